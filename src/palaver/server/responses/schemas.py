"""Request and response bodies of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from palaver.server.openai.schemas import MediaOptions, Number, RequestFields, Stop, Switched, Whole

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
]
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_CONTENT = "reasoning.encrypted_content"
MAX_METADATA = 16
MAX_NAME = 64
MAX_VALUE = 512


class InputContent(RequestFields):
    type: str = Field(
        description="input_text, output_text, input_image, input_audio, input_file, refusal, or text of a thought."
    )
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(None, description="A data URL.")
    input_audio: dict[str, Any] | None = Field(None, description="`data` in base64, and its `format`.")
    file_data: str | None = Field(None, description="A data URL, or base64.")
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = Field(None, description="Ignored.")
    annotations: list[Any] | None = Field(None, description="Ignored.")
    logprobs: list[Any] | None = Field(None, description="Ignored.")
    prompt_cache_breakpoint: Any = Field(None, description="Ignored.")


class InputItem(RequestFields):
    """A message, a thought, a call of a function, its result, a reference to one of these by its id, or what concerns
    tools of servers: their lists, calls, and approvals."""

    type: (
        Literal[
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "item_reference",
            "mcp_list_tools",
            "mcp_call",
            "mcp_approval_request",
            "mcp_approval_response",
        ]
        | None
    ) = None
    id: str | None = None
    status: str | None = Field(None, description="Ignored.")
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputContent] | None = None
    phase: str | None = Field(None, description="Ignored.")
    summary: list[InputContent] | None = Field(None, description="Of a thought, where there is no content.")
    encrypted_content: str | None = Field(None, description="Of a thought, where there is neither.")
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputContent] | None = None
    server_label: str | None = Field(None, description="Of a call of a server's tool. Ignored.")
    tools: list[Any] | None = Field(None, description="Of a list of tools. Ignored.")
    error: Any = Field(None, description="Of a call of a server's tool that failed.")
    approval_request_id: str | None = None
    approve: bool | None = None
    reason: str | None = Field(None, description="Why a call was not approved, for the model.")


class FunctionTool(RequestFields):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Forced calls always follow the schema.")


class McpToolFilter(RequestFields):
    tool_names: list[str] | None = None
    read_only: bool | None = None


class McpApprovalFilters(RequestFields):
    always: McpToolFilter | None = None
    never: McpToolFilter | None = None


class McpTool(RequestFields):
    """The tools of a tool server. Palaver calls them."""

    type: Literal["mcp"]
    server_label: str = Field(description="Without a URL, the name of a tool server of this user.")
    server_url: str | None = Field(None, description="Of streamable HTTP, at a public address. It is not stored.")
    server_description: str | None = Field(None, description="Ignored.")
    allowed_tools: list[str] | McpToolFilter | None = None
    require_approval: Literal["always", "never"] | McpApprovalFilters | None = None
    headers: dict[str, str] | None = Field(None, description="They are not stored.")
    authorization: str | None = Field(None, description="An access token, for the header. It is not stored.")


class NamedTool(RequestFields):
    type: Literal["function"] = "function"
    name: str


class McpToolChoice(RequestFields):
    """One tool of a server, or any of its tools."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class AllowedTools(RequestFields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(description="The prompt has these tools only.")


class TextFormat(RequestFields):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestFields):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored.")


class ResponseReasoning(RequestFields):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The whole thought is the item's summary instead of its content."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="The same.")


class ConversationReference(RequestFields):
    id: str


class ResponseStreamOptions(RequestFields):
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class ResponseRequest(RequestFields):
    model: str | None = None
    input: list[InputItem] | str | None = Field(None, description="Text, or a list of items.")
    instructions: str | None = Field(None, description="The system prompt of this response only.")
    stream: Switched = None
    stream_options: ResponseStreamOptions | None = None
    store: Switched = Field(None, description="Unless false, the response is stored in a conversation.")
    background: Switched = None
    previous_response_id: str | None = None
    conversation: str | ConversationReference | None = None
    metadata: dict[str, str] | None = None
    include: list[Includable] | None = None
    reasoning: ResponseReasoning | None = None
    text: TextOptions | None = None
    tools: list[Annotated[FunctionTool | McpTool, Field(discriminator="type")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | McpToolChoice | AllowedTools | None = None
    parallel_tool_calls: Switched = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Whole = Field(None, description="Of the whole reply, thinking included.")
    temperature: Number = None
    top_p: Number = None
    top_logprobs: Whole = None
    max_tool_calls: Whole = Field(None, description="Ignored: it counts calls of tools that are not here.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Ignored.")
    user: str | None = Field(None, description="Ignored.")
    top_k: Whole = Field(None, description="0 or -1 is off.")
    min_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    end_penalty: Number = None
    logit_bias: dict[str, float] | None = None
    seed: Whole = None
    steps: Whole = Field(None, description="Diffusion models: the steps of a block.")
    block_length: Whole = Field(None, description="Diffusion models: the tokens of a block.")
    remasking: str | None = Field(None, description="Diffusion models: confidence or entropy.")
    stop: Stop = Field(None, description="Strings or token ids; they apply to the answer only.")
    min_tokens: Whole = None
    banned_strings: str | list[str] | None = None
    enable_thinking: Switched = None
    thinking_budget: Whole = None
    chat_template_kwargs: dict[str, Any] | None = None
    media: MediaOptions | None = None


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseBody(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    model: str
    output: list[dict[str, Any]] = Field(
        description="Items: reasoning, message, function_call, mcp_list_tools, mcp_call, mcp_approval_request."
    )
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    previous_response_id: str | None
    conversation: ConversationReference | None
    metadata: dict[str, str]
    max_output_tokens: int | None
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    notices: list[str] = Field(default=[], description="Information for the reader of the reply.")


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
