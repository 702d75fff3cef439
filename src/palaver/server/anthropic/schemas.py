"""Request and response bodies of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from palaver.server.openai.request import ToleratedFields
from palaver.server.openai.schemas import MediaOptions, Number, RequestFields, Switched, Whole

_KEEP_THOUGHTS = tuple(
    {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"})
)
"""Claude Code's `context_management`: thoughts that the client sends are never cleared here."""
TOLERATED = ToleratedFields(
    ignored=frozenset(
        (
            "cache_control",
            "citations",
            "caller",
            "service_tier",
            "inference_geo",
            "speed",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
            "betas",
            "eager_input_streaming",
        )
    ),
    harmless={
        "mcp_servers": ([],),
        "context_management": ({}, {"edits": []}, *_KEEP_THOUGHTS),
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    },
)
"""Fields that are accepted without effect: hints for speed or accounting, and values that ask for the default."""


_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document")


class TextBlock(RequestFields):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestFields):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="As received. Without one the text of the thought is used.")


class RedactedThinkingBlock(RequestFields):
    type: Literal["redacted_thinking"]
    data: str = Field(description="Encrypted by Anthropic's servers; left out of the prompt.")


class ToolUseBlock(RequestFields):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MediaSource(RequestFields):
    type: str = Field(description="base64, url; of a document also text or content.")
    media_type: str | None = Field(None, description="Ignored: the type is detected from the data.")
    data: str | None = None
    url: str | None = None
    content: str | list[ResultBlock] | None = None


class ImageBlock(RequestFields):
    type: Literal["image"]
    source: MediaSource


class DocumentBlock(RequestFields):
    """A text, PDF, DOCX or HTML file, which is read as text."""

    type: Literal["document"]
    source: MediaSource
    title: str | None = None
    context: str | None = None


class OtherBlock(RequestFields):
    """What is not supported: it is refused by its type."""

    type: str = Field(json_schema_extra={"not": {"enum": list(_BLOCK_TYPES)}})


class ToolResultBlock(RequestFields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: Switched = Field(None, description="`Error: ` is put before the content.")


def _block_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in _BLOCK_TYPES else "other"


def _result_block_type(value: Any) -> str:
    kind = _block_type(value)
    return kind if kind in ("text", "image", "document") else "other"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_result_block_type),
]
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_block_type),
]


class InputMessage(RequestFields):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(RequestFields):
    type: str | None = Field(None, description="`custom`, or nothing. Tools that a server would run are refused.")
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: Switched = Field(None, description="Forced calls always follow the schema.")


class ToolChoice(RequestFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With `tool`: which one.")
    disable_parallel_tool_use: Switched = None


class ThinkingConfig(RequestFields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole = Field(
        None, description="After this many tokens the thought is closed and the answer begins."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves out the text of the thought; its signature still has it."
    )


class OutputFormat(RequestFields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestFields):
    effort: str | None = Field(None, description="A level that the model's template has.")
    format: OutputFormat | None = None


class CountRequest(RequestFields):
    model: str | None = None
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="The default is the template's.")
    output_config: OutputConfig | None = None
    media: MediaOptions | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, description="New tokens, thinking included.")
    stream: Switched = None
    stop_sequences: list[str] | None = Field(None, description="They apply to the answer only.")
    temperature: Number = None
    top_p: Number = None
    top_k: Whole = Field(None, description="0 or -1 is off.")
    min_p: Number = None
    repetition_penalty: Number = None
    seed: Whole = None
    steps: Whole = Field(None, description="Diffusion models: the steps of a block.")
    block_length: Whole = Field(None, description="Diffusion models: the tokens of a block.")
    remasking: str | None = Field(None, description="Diffusion models: confidence or entropy.")
    metadata: dict[str, Any] | None = Field(None, description="`conversation` names one; the rest is ignored.")


class AnthropicUsage(BaseModel):
    input_tokens: int = Field(description="Prompt tokens that were computed.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="Prompt tokens from the cache.")
    output_tokens: int
    output_tokens_details: dict[str, int] = Field(description="`thinking_tokens`: the tokens of the thought.")


class AnthropicMessage(BaseModel):
    """A whole reply. With `stream` the same comes as events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "tool_use", "max_tokens", "stop_sequence", "model_context_window_exceeded", "pause_turn"
    ]
    stop_sequence: str | None
    usage: AnthropicUsage
    notices: list[str] | None = Field(None, description="Information for the reader of the reply.")
    metadata: dict[str, str] | None = Field(None, description="Of a conversation: it, the message and the reply.")


ToolResultBlock.model_rebuild()
