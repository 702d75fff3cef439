"""The OpenAPI document keeps its published component names, whatever the classes are called."""

from __future__ import annotations

import json
from typing import Any

from palaver.server.openapi import PUBLISHED_NAMES, publish_names
from tests.server.live_server import LiveServer

COMPONENTS = """
AllowedChatTools AllowedTools AllowedToolsChoice Alternative AnswerDelta AnthropicError Append AudioWish Blob
BlobPut CallMade Change ChangeConversation Changed ChatMessage ChatRequest Client Closing CompletionRequest
Constraint Continue Conversation ConversationName CountRequest Create Cursor DeletePreset DetokenizeRequest Edit
Entry Error ErrorBody Failed Finish Finished Follow Followed Fork Format Function FunctionCall FunctionTool Gauge
Grammar Health Hit IncompleteDetails InputContent InputItem InputItemList InputTokens JsonSchema Leaf Load
LoadRequest MeasureContext Media Message MessageGiven MessageTold MessagesRequest ModelCard ModelState Move
NamedAudio NamedFunction NamedTool NamedVoice Node Notice Opened OtherBlock OutputConfig OutputFormat Phase
PhaseOpened Preset Raw ReasoningWish RedactedThinkingBlock Refused RenderRequest Reply ResponseBody ResponseDeleted
ResponseFailure ResponseFormat ResponseRequest ResponseUsage Role Said Sampling SavePreset Say Session Settings
SignIn Snapshot SpeechRequest Started Status Stored StoredReply StreamOptions StreamWish StructuredOutputs Switch
SwitchKind Text TextBlock TextFormat TextWish Thinking ThinkingBlock ThinkingConfig ThinkingDelta ThinkingWish
ThoughtWish Token TokenCount TokenizeRequest TokensRead TokensWritten Tool ToolCall ToolCallDelta ToolCallOpened
ToolChoice ToolGiven ToolName ToolOffered ToolResult ToolResultBlock ToolUseBlock TurnEvent Usage UsageTold Waiting
"""


def test_component_names_are_pinned(live: LiveServer) -> None:
    document = live.server.routes.openapi()
    assert sorted(document["components"]["schemas"]) == COMPONENTS.split()


def test_every_reference_is_to_a_component(live: LiveServer) -> None:
    document = live.server.routes.openapi()
    parts = json.dumps(document).split('"#/components/schemas/')[1:]
    assert {part.partition('"')[0] for part in parts} <= set(document["components"]["schemas"])


def test_every_published_name_is_a_component() -> None:
    assert len(set(PUBLISHED_NAMES.values())) == len(PUBLISHED_NAMES)
    assert set(PUBLISHED_NAMES.values()) - set(COMPONENTS.split()) == set()


def test_keys_titles_and_references_are_renamed() -> None:
    ref = "#/components/schemas/"
    schemas: dict[str, Any] = {
        "Zebra": {"title": "Zebra", "items": {"$ref": f"{ref}TextSchema"}},
        "TextSchema": {"title": "TextSchema", "discriminator": {"mapping": {"text": f"{ref}TextSchema"}}},
    }
    assert publish_names({"components": {"schemas": schemas}}) == {
        "components": {
            "schemas": {
                "Text": {"title": "Text", "discriminator": {"mapping": {"text": f"{ref}Text"}}},
                "Zebra": {"title": "Zebra", "items": {"$ref": f"{ref}Text"}},
            }
        }
    }
