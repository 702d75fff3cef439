"""The OpenAPI document: FastAPI's own, with the error responses of this server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from palaver.server.errors import is_anthropic

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "name": {"type": "string"},
                "details": {"type": "object"},
            },
        }
    },
}
_ERROR_RESPONSE = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
        "request_id": {"type": "string"},
    },
}
_ANTHROPIC_ERROR_RESPONSE = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AnthropicError"}}},
}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


PUBLISHED_NAMES = {
    "AddToolServerRequest": "AddToolServer",
    "AnthropicMessage": "MessageTold",
    "AnthropicUsage": "UsageTold",
    "AppendMessageRequest": "Append",
    "AudioOptions": "AudioWish",
    "AudioReference": "NamedAudio",
    "BlobUploadSchema": "BlobPut",
    "CallDecisionSchema": "CallDecision",
    "ChatTool": "ToolOffered",
    "ChooseReplyRequest": "ChooseReply",
    "ColumnSchema": "Column",
    "CompareRequest": "Compare",
    "ContextUsage": "Gauge",
    "ContextUsageRequest": "MeasureContext",
    "ContinueReplyRequest": "Continue",
    "ConversationChange": "Change",
    "ConversationDefaults": "Defaults",
    "ConversationReference": "ConversationName",
    "CountTokensRequest": "CountTokens",
    "CreateConversationBody": "CreateConversation",
    "CreateConversationRequest": "Create",
    "CreateItemsRequest": "CreateItems",
    "CursorRequest": "Client",
    "DecideCallsRequest": "DecideCalls",
    "DocumentSchema": "Document",
    "DeletePresetRequest": "DeletePreset",
    "EditMessageRequest": "Edit",
    "ErrorSchema": "Error",
    "FinishSignInRequest": "FinishToolSignIn",
    "FollowRequest": "Follow",
    "ForgottenSchema": "Forgotten",
    "ForkReplyRequest": "Fork",
    "FunctionDefinition": "Function",
    "FunctionName": "NamedFunction",
    "Image": "Media",
    "Audio": "Media",
    "KeySignIn": "SignIn",
    "SignInSchema": "ToolSignIn",
    "StartSignInRequest": "StartToolSignIn",
    "Video": "Media",
    "InputMessage": "MessageGiven",
    "InputTokensDetails": "TokensRead",
    "InputTool": "ToolGiven",
    "LeafSchema": "Leaf",
    "LoadModelRequest": "Load",
    "LogEntry": "Entry",
    "MessageSchema": "Message",
    "MessageToolCall": "CallMade",
    "MoveCursorRequest": "Move",
    "NamedTool": "ToolName",
    "NamedToolChoice": "NamedTool",
    "NewShareSchema": "NewShare",
    "OutputTokensDetails": "TokensWritten",
    "RawReplySchema": "Raw",
    "ReasoningOptions": "ReasoningWish",
    "ReadToolResourceRequest": "ReadToolResource",
    "RemoveToolServerRequest": "RemoveToolServer",
    "ReplySettings": "Settings",
    "ReplyStatus": "Status",
    "ReplyToken": "Token",
    "ResponseReasoning": "ThoughtWish",
    "ResponseStreamOptions": "StreamWish",
    "SaveDefaultsRequest": "SaveDefaults",
    "SavePresetRequest": "SavePreset",
    "SearchHit": "Hit",
    "SendMessageRequest": "Say",
    "SentMessage": "Said",
    "ServerCard": "ToolServer",
    "ServerResource": "ToolResource",
    "SessionInfo": "Session",
    "ShareBranchRequest": "ShareBranch",
    "StartReplyRequest": "Reply",
    "StoredMessage": "Stored",
    "StreamChange": "Changed",
    "StreamClosing": "Closing",
    "StreamOpened": "Opened",
    "TextOptions": "TextWish",
    "ThinkingOptions": "ThinkingWish",
    "TokenAlternative": "Alternative",
    "TokenCountSchema": "TextTokens",
    "TranscriptFormat": "Format",
    "TreeNode": "Node",
    "TurnPosition": "Followed",
    "TurnRefused": "Refused",
    "TranscriptionSchema": "Transcription",
    "UpdateConversationBody": "UpdateConversation",
    "UpdateConversationRequest": "ChangeConversation",
    "VoiceReference": "NamedVoice",
}
"""The component names of the document, by class. Clients generate code from them, so a renamed class keeps its name.
Classes with the same name are one component; they differ at most in their `type` and in optional kinds of parts."""
PUBLISHED_VALUES = {
    "Alternative": "",
    "AnswerDelta": "",
    "Blob": "A picture, sound or video by its digest: `GET /api/blobs/{digest}` returns it.",
    "Change": "Something changed in a conversation: clients that show it should read it again.",
    "Changed": "",
    "Closing": "The server shuts down: reconnect soon.",
    "ComparedReply": "One column of a comparison; without a name while a blind choice is open.",
    "Comparison": "Replies to one message that are compared. `chosen_id` is null if no reply is better.",
    "Constraint": "",
    "Conversation": "",
    "Cursor": "The message at which a client is; null is before the first message.",
    "Entry": "One event of one turn. `number` counts the numbered events up to here: reconnect with it.",
    "DraftBlock": (
        "The block that a diffusion model denoises: a text for each token, null while it is masked. It has no number,"
        " and each replaces the one before."
    ),
    "Failed": "The turn ended with an error; its text so far is kept.",
    "Finished": (
        "`tail` is text that was held back because it could have become a marker; remove it if the reply is continued."
    ),
    "Gauge": "How full the context is: the tokens of the next turn's prompt, and the model's limit.",
    "Hit": "A message that a search found.",
    "Media": "A picture, sound or video with its data.",
    "Message": "",
    "ModelCard": "The model in use or being loaded. Some fields are empty until it is loaded.",
    "Node": "A message's place in the tree, without its content.",
    "Notice": "Information about the reply for its reader, in one sentence.",
    "Opened": "The first event in a stream of many turns. Earlier changes are not sent.",
    "PhaseOpened": "From here on the model is thinking, answering or calling a tool.",
    "Preset": "A system prompt and parameters that a user saved under a name.",
    "Refused": "This turn can't be read; the others go on.",
    "RoundCall": "A tool call that runs on the server. `edited`: the user's own arguments, if they changed them.",
    "Said": "A message and the reply that was started.",
    "Sampling": "",
    "ServerTool": "A tool of a server; `name` is the name that models use, `tool` its name at the server.",
    "Settings": "Everything that determines a reply.",
    "Snapshot": "The message up to here, in place of events that can't be sent again.",
    "Started": "The prompt is in the cache, the first token comes next.",
    "Stored": "A message in its place in the tree. `reply` is null if no model generated the message here.",
    "StoredReply": "The settings and the outcome of a reply. It can be continued in every status but running and done.",
    "Switch": "One variable of the model's chat template.",
    "TallyRow": "How often the replies of one name were compared and chosen, and how often blind.",
    "Text": "",
    "Thinking": "A thought of the model; never part of its answer.",
    "ThinkingDelta": "`tokens`: the thinking tokens of the reply up to here, as in `PhaseOpened`.",
    "Token": "One token of a reply as a person sees it. `logprob` is null for text that was not sampled.",
    "Tool": "A function offered to the model; `parameters` is a JSON schema.",
    "ToolCall": "`arguments` is the JSON text as the model wrote it; it may be cut off or wrong.",
    "ToolCallDelta": "The next piece of the arguments' JSON text.",
    "ToolCallOpened": "",
    "ToolResult": "",
    "ToolRound": "The tool calls of one reply that run on the server; `next_id` is the reply to their results.",
    "ToolRule": "A user's rule about a tool in a conversation, or about a server in all conversations.",
    "ToolServer": "A tool server and its state.",
    "TurnEvent": "",
    "Usage": "",
    "Waiting": "The turn is queued; 1 is next.",
}
"""The components that are generated from values, with their published descriptions. All their fields are required, but
for `ADDED_FIELDS`."""
ADDED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "Blob": ("name", "width", "height", "seconds"),
    "Hit": ("in_thought",),
    "Media": ("name", "width", "height", "seconds"),
    "ModelCard": ("exactness", "steps", "fingerprint", "lacks", "block_length"),
    "PhaseOpened": ("tokens",),
    "RoundCall": ("media",),
    "ToolServer": ("needs_sign_in",),
    "Sampling": (
        "typical_p",
        "top_a",
        "dynatemp_range",
        "dynatemp_exponent",
        "xtc_probability",
        "xtc_threshold",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "spoken",
        "steps",
        "block_length",
        "remasking",
    ),
    "Settings": ("fingerprints", "answer_at"),
    "Started": ("notice", "thinking_seconds"),
    "ThinkingDelta": ("tokens",),
    "Waiting": ("loading", "progress"),
}
"""Fields that were added to a published component later: older servers do not send them."""
WIDER_FIELDS: Mapping[tuple[str, str], Mapping[str, Any]] = {("Switch", "type"): {"type": "string", "title": "Type"}}
"""Fields that are published with a wider type than their own."""
_REF = "#/components/schemas/"


def install_openapi(app: FastAPI) -> None:
    """Makes the application serve `openapi_document`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(
                get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def openapi_document(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with published names, real errors and the ways to send a key."""
    document = publish_names(document)
    for path, operations in document["paths"].items():
        response = _ANTHROPIC_ERROR_RESPONSE if is_anthropic(path, {}) else _ERROR_RESPONSE
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": response, "5XX": response}
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]
    return document


def publish_names(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its components under their published names: keys, titles and references."""
    published: dict[str, Any] = _with_published_names(document)
    schemas = published.get("components", {}).get("schemas", {})
    renamed: dict[str, Any] = {}
    for name in sorted(schemas, key=_published_order):
        public, schema = PUBLISHED_NAMES.get(name, name), schemas[name]
        if public in renamed and public not in PUBLISHED_VALUES:
            raise ValueError("two classes are published under one name")
        schema = {**schema, "title": public} if schema.get("title") == name else schema
        schema = _published_value(public, schema) if public in PUBLISHED_VALUES else schema
        renamed[public] = _merge_tags(renamed[public], schema) if public in renamed else schema
    if schemas:
        published["components"]["schemas"] = dict(sorted(renamed.items()))
    return published


def _published_order(name: str) -> int:
    """Classes that share a component are merged in the order of the table, other classes come first."""
    return list(PUBLISHED_NAMES).index(name) if name in PUBLISHED_NAMES else -1


def _published_value(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The component of a value, with its published description and required fields."""
    optional, properties = ADDED_FIELDS.get(name, ()), schema["properties"]
    if "const" in properties.get("type", {}):  # the tag of a union, which comes first in the JSON, too
        properties = {"type": properties["type"], **properties}
    required = [field for field in properties if field not in optional]
    described = {"description": PUBLISHED_VALUES[name]} if PUBLISHED_VALUES[name] else {}
    return {
        "properties": {
            field: WIDER_FIELDS.get((name, field))
            or {key: item for key, item in of.items() if key != "default" or field in optional}
            for field, of in properties.items()
        },
        "type": "object",
        "required": required,
        "title": schema["title"],
        **described,
    }


def _merge_tags(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The second component, with the `type` of either."""
    tags = [first["properties"].get("type", {}), second["properties"].get("type", {})]
    kinds = [kind for tag in tags for kind in tag.get("enum", [tag["const"]] if "const" in tag else [])]
    tag = {"type": "string", "enum": kinds, "title": "Type"}
    return {**second, "properties": {**second["properties"], **({"type": tag} if kinds else {})}}


def _with_published_names(value: Any) -> Any:
    """A copy of a JSON value with every reference to a component under its published name."""
    match value:
        case dict():
            return {key: _with_published_names(item) for key, item in value.items()}
        case list():
            return _without_duplicates([_with_published_names(item) for item in value])
        case str() if value.startswith(_REF):
            name = value.removeprefix(_REF)
            return _REF + PUBLISHED_NAMES.get(name, name)
        case _:
            return value


def _without_duplicates(items: list[Any]) -> list[Any]:
    """References to classes that are one component are one reference."""
    return [item for index, item in enumerate(items) if item not in items[:index] or "$ref" not in item]
