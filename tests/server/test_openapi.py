"""The OpenAPI document keeps its published component names, whatever the classes are called."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from palaver.server.openapi import ADDED_FIELDS, PUBLISHED_NAMES, PUBLISHED_VALUES, publish_names
from tests.server.live_server import LiveServer

COMPONENTS = """
AddToolServer AllowedChatTools AllowedTools AllowedToolsChoice Alternative AnswerDelta AnthropicError Append AudioWish
Blob BlobPut CallDecision CallMade CallState Change ChangeConversation Changed ChatMessage ChatRequest ChooseReply
Client Closing Column Compare ComparedReply Comparison CompletionRequest Constraint Continue Conversation
ConversationDeleted ConversationName ConversationResource CountRequest CountTokens Create CreateConversation
CreateItems Cursor DecideCalls Defaults DeletePreset DetokenizeRequest Document DocumentBlock DraftBlock Edit Entry
Error ErrorBody Failed FillRequest Finish FinishToolSignIn Finished Follow Followed Forgotten Fork Format Function
FunctionCall FunctionTool Gauge Grammar Health Hit ImageBlock ImportReport IncompleteDetails InputContent InputItem
InputItemList InputTokens JsonSchema Leaf Load LoadRequest McpApprovalFilters McpTool McpToolChoice McpToolFilter
MeasureContext Media MediaOptions MediaSource Message MessageGiven MessageTold MessagesRequest ModelCard ModelState
Move NamedAudio NamedFunction NamedTool NamedVoice NewShare Node Notice Opened OtherBlock OutputConfig OutputFormat
Phase PhaseOpened Preset Raw ReadToolResource ReasoningWish RedactedThinkingBlock Refused Remember RemoveToolServer
RenderRequest Reply ResponseBody ResponseDeleted ResponseFailure ResponseFormat ResponseRequest ResponseUsage Role
RoundCall RoundState Rule Said Sampling SaveDefaults SavePreset Say ServerTool Session Settings Share ShareBranch
SignIn SkippedConversation Snapshot SpeechRequest StartToolSignIn Started Status Stored StoredReply StreamOptions
StreamWish StructuredOutputs Switch SwitchKind TallyRow Text TextBlock TextFormat TextTokens TextWish Thinking
ThinkingBlock ThinkingConfig ThinkingDelta ThinkingWish ThoughtWish Token TokenCount TokenizeRequest TokensRead
TokensWritten Tool ToolCall ToolCallDelta ToolCallOpened ToolChoice ToolGiven ToolName ToolOffered ToolResource
ToolResult ToolResultBlock ToolRound ToolRule ToolServer ToolServerState ToolSignIn ToolUseBlock Transcription
TranscriptionRequest TranslationRequest TurnEvent UnloadRequest UpdateConversation Usage UsageOptions UsageTold
Waiting
"""


def test_component_names_are_pinned(live: LiveServer) -> None:
    document = live.server.routes.openapi()
    assert sorted(document["components"]["schemas"]) == COMPONENTS.split()


def test_every_reference_is_to_a_component(live: LiveServer) -> None:
    document = live.server.routes.openapi()
    parts = json.dumps(document).split('"#/components/schemas/')[1:]
    assert {part.partition('"')[0] for part in parts} <= set(document["components"]["schemas"])


def test_every_published_name_is_a_component() -> None:
    shared = [name for name, count in Counter(PUBLISHED_NAMES.values()).items() if count > 1]
    assert shared == ["Media"]
    assert set(PUBLISHED_NAMES.values()) | set(PUBLISHED_VALUES) <= set(COMPONENTS.split())
    assert set(ADDED_FIELDS) <= set(PUBLISHED_VALUES)


def test_keys_titles_and_references_are_renamed() -> None:
    ref = "#/components/schemas/"
    schemas: dict[str, Any] = {
        "Zebra": {"title": "Zebra", "items": {"$ref": f"{ref}LeafSchema"}},
        "LeafSchema": {"title": "LeafSchema", "discriminator": {"mapping": {"leaf": f"{ref}LeafSchema"}}},
    }
    assert publish_names({"components": {"schemas": schemas}}) == {
        "components": {
            "schemas": {
                "Leaf": {"title": "Leaf", "discriminator": {"mapping": {"leaf": f"{ref}Leaf"}}},
                "Zebra": {"title": "Zebra", "items": {"$ref": f"{ref}Leaf"}},
            }
        }
    }


def test_the_fields_of_a_value_are_required_but_for_later_ones() -> None:
    started = {
        "title": "Started",
        "description": "Another one.",
        "type": "object",
        "properties": {
            "prompt_tokens": {"type": "integer"},
            "notice": {"type": "string", "default": ""},
            "type": {"const": "started", "default": "started"},
        },
        "required": ["prompt_tokens"],
    }
    published = publish_names({"components": {"schemas": {"Started": started}}})["components"]["schemas"]["Started"]
    assert published["required"] == ["type", "prompt_tokens"]
    assert published["properties"] == {
        "type": {"const": "started"},
        "prompt_tokens": {"type": "integer"},
        "notice": {"type": "string", "default": ""},
    }
    assert published["description"] == PUBLISHED_VALUES["Started"]


def test_the_kinds_of_media_are_one_component() -> None:
    schemas: dict[str, Any] = {
        name: {"title": name, "properties": {"type": {"const": name.lower()}, "data": {}}, "required": ["data"]}
        for name in ("Audio", "Image", "Video")
    }
    schemas["Box"] = {"oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Audio", "Image", "Video")]}
    published = publish_names({"components": {"schemas": schemas}})["components"]["schemas"]
    assert published["Box"] == {"oneOf": [{"$ref": "#/components/schemas/Media"}]}
    assert published["Media"]["properties"]["type"]["enum"] == ["image", "audio", "video"]
    assert list(published) == ["Box", "Media"]
