"""The OpenAPI document: FastAPI's own, with the error responses of this server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from palaver.server.anthropic.errors import is_anthropic

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
    "AnswerDeltaSchema": "AnswerDelta",
    "AnthropicMessage": "MessageTold",
    "AnthropicUsage": "UsageTold",
    "AppendMessageRequest": "Append",
    "AudioOptions": "AudioWish",
    "AudioReference": "NamedAudio",
    "BlobSchema": "Blob",
    "BlobUploadSchema": "BlobPut",
    "ChatTool": "ToolOffered",
    "ConstraintSchema": "Constraint",
    "ContextUsageRequest": "MeasureContext",
    "ContextUsageSchema": "Gauge",
    "ContinueReplyRequest": "Continue",
    "ConversationChangeSchema": "Change",
    "ConversationReference": "ConversationName",
    "ConversationSchema": "Conversation",
    "CreateConversationRequest": "Create",
    "CursorRequest": "Client",
    "CursorSchema": "Cursor",
    "DeletePresetRequest": "DeletePreset",
    "EditMessageRequest": "Edit",
    "ErrorSchema": "Error",
    "FailedSchema": "Failed",
    "FinishedSchema": "Finished",
    "FollowRequest": "Follow",
    "ForkReplyRequest": "Fork",
    "FunctionDefinition": "Function",
    "FunctionName": "NamedFunction",
    "InputMessage": "MessageGiven",
    "InputTokensDetails": "TokensRead",
    "InputTool": "ToolGiven",
    "LeafSchema": "Leaf",
    "LoadModelRequest": "Load",
    "LogEntrySchema": "Entry",
    "MediaSchema": "Media",
    "MessageSchema": "Message",
    "MessageToolCall": "CallMade",
    "ModelCardSchema": "ModelCard",
    "MoveCursorRequest": "Move",
    "NamedTool": "ToolName",
    "NamedToolChoice": "NamedTool",
    "NoticeSchema": "Notice",
    "OutputTokensDetails": "TokensWritten",
    "PhaseOpenedSchema": "PhaseOpened",
    "PresetSchema": "Preset",
    "RawReplySchema": "Raw",
    "ReasoningOptions": "ReasoningWish",
    "ReplySettingsSchema": "Settings",
    "ReplyStatus": "Status",
    "ReplyTokenSchema": "Token",
    "ResponseReasoning": "ThoughtWish",
    "ResponseStreamOptions": "StreamWish",
    "SamplingSchema": "Sampling",
    "SavePresetRequest": "SavePreset",
    "SearchHitSchema": "Hit",
    "SendMessageRequest": "Say",
    "SentMessageSchema": "Said",
    "SessionInfo": "Session",
    "SnapshotSchema": "Snapshot",
    "StartReplyRequest": "Reply",
    "StartedSchema": "Started",
    "StoredMessageSchema": "Stored",
    "StoredReplySchema": "StoredReply",
    "StreamChangeSchema": "Changed",
    "StreamClosingSchema": "Closing",
    "StreamOpenedSchema": "Opened",
    "SwitchSchema": "Switch",
    "TextOptions": "TextWish",
    "TextSchema": "Text",
    "ThinkingDeltaSchema": "ThinkingDelta",
    "ThinkingOptions": "ThinkingWish",
    "ThinkingSchema": "Thinking",
    "TokenAlternativeSchema": "Alternative",
    "ToolCallDeltaSchema": "ToolCallDelta",
    "ToolCallOpenedSchema": "ToolCallOpened",
    "ToolCallSchema": "ToolCall",
    "ToolResultSchema": "ToolResult",
    "ToolSchema": "Tool",
    "TranscriptFormat": "Format",
    "TreeNodeSchema": "Node",
    "TurnEventSchema": "TurnEvent",
    "TurnPosition": "Followed",
    "TurnRefusedSchema": "Refused",
    "UpdateConversationRequest": "ChangeConversation",
    "UsageSchema": "Usage",
    "VoiceReference": "NamedVoice",
    "WaitingSchema": "Waiting",
}
"""The component names of the document, by class. Clients generate code from them, so a renamed class keeps its name."""
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
    renamed = {}
    for name, schema in schemas.items():
        public = PUBLISHED_NAMES.get(name, name)
        renamed[public] = {**schema, "title": public} if schema.get("title") == name else schema
    if len(renamed) != len(schemas):
        raise ValueError("two classes are published under one name")
    if schemas:
        published["components"]["schemas"] = dict(sorted(renamed.items()))
    return published


def _with_published_names(value: Any) -> Any:
    """A copy of a JSON value with every reference to a component under its published name."""
    match value:
        case dict():
            return {key: _with_published_names(item) for key, item in value.items()}
        case list():
            return [_with_published_names(item) for item in value]
        case str() if value.startswith(_REF):
            name = value.removeprefix(_REF)
            return _REF + PUBLISHED_NAMES.get(name, name)
        case _:
            return value
