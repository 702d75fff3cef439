"""The request bodies, as in the OpenAPI document. `palaver.sampling` checks the ranges of sampling values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Stop = str | int | list[str | int] | None
Whole = int | None
Number = float | None
Switched = bool | None


class RequestFields(BaseModel):
    """Unknown fields are kept: `request.check_nested_fields` refuses or ignores them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class FunctionCall(RequestFields):
    name: str
    arguments: str | dict[str, Any] = ""
    parsed_arguments: Any = Field(default=None, description="Ignored, as OpenAI's helpers have it.")
    provider_specific_fields: dict[str, Any] | None = Field(default=None, description="Ignored.")


class MessageToolCall(RequestFields):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Whole = Field(default=None, description="Of a streamed call. Ignored.")
    provider_specific_fields: dict[str, Any] | None = Field(default=None, description="Ignored.")


class VoiceReference(RequestFields):
    id: str


class AudioOptions(RequestFields):
    voice: str | VoiceReference | None = None
    format: str | None = Field(None, description="wav, flac, mp3, opus or pcm16; in a stream pcm16.")


class AudioReference(RequestFields):
    id: str = Field(description="Of a recording that an earlier reply came with.")


class ChatMessage(RequestFields):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = Field(None, description="Text, or a list of parts.")
    reasoning_content: str | None = Field(None, description="The assistant's thought.")
    reasoning: str | None = Field(None, description="The same, as some clients name it.")
    thinking: str | None = Field(None, description="The same.")
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = Field(None, description="Used as text of the assistant.")
    audio: AudioReference | None = Field(None, description="Its transcript is used as the text.")
    token_ids: list[int] | None = Field(None, description="Of an assistant's message: the ids it was generated as.")
    annotations: list[Any] | None = Field(None, description="Ignored, as OpenAI's replies have it.")
    parsed: Any = Field(None, description="Ignored, as OpenAI's helpers have it.")
    reasoning_details: list[Any] | None = Field(None, description="Ignored, as OpenRouter's replies have it.")
    thinking_blocks: list[Any] | None = Field(None, description="Ignored, as LiteLLM's replies have it.")
    provider_specific_fields: dict[str, Any] | None = Field(None, description="Ignored, as LiteLLM's replies have it.")


class FunctionDefinition(RequestFields):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Forced calls always follow the schema.")


class ChatTool(RequestFields):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestFields):
    name: str


class NamedToolChoice(RequestFields):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedChatTools(RequestFields):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedToolChoice] = Field(description="The prompt has these tools only.")


class AllowedToolsChoice(RequestFields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedChatTools


class StructuredOutputs(RequestFields):
    """What the answer must look like, as vLLM's clients say it. One of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A schema.")
    json_object: Switched = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="In Lark's notation, or GBNF.")


class JsonSchema(RequestFields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestFields):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = Field(None, description="In Lark's notation, or GBNF.")


class StreamOptions(RequestFields):
    """Without `stream` they mean nothing."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="With include_usage: every chunk has the usage so far.")
    include_drafts: bool = Field(False, description="Diffusion models: choices have a `draft` after each step.")
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class UsageOptions(RequestFields):
    include: bool = False


class ThinkingOptions(RequestFields):
    type: Literal["enabled", "disabled", "adaptive"] = "enabled"
    budget_tokens: Whole = None


class ReasoningOptions(RequestFields):
    effort: str | None = None
    max_tokens: Whole = None
    enabled: Switched = None


class MediaOptions(RequestFields):
    """How pictures and videos are processed."""

    max_slice_nums: Whole = Field(None, description="The most slices of a picture, for models that slice pictures.")
    use_image_id: Whole = Field(None, description="0: pictures are not numbered, for models that number them.")
    frames_per_second: Whole = Field(None, description="Of a video; 1 if left out.")
    max_frames: Whole = Field(None, description="Of a video; 64 if left out.")
    stack_frames: Whole = Field(None, description="Frames of each second, all but the first joined in one picture.")


class SamplingFields(RequestFields):
    """How tokens are chosen. Defaults are the model's own, or the operator's."""

    model: str | None = None
    stream: Switched = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = Field(None, description="include_usage, as OpenRouter's clients send it.")
    n: Whole = Field(None, description="Different replies under one seed.")
    temperature: Number = None
    top_p: Number = None
    top_k: Whole = Field(None, description="0 or -1 is off.")
    min_p: Number = None
    typical_p: Number = None
    typical: Number = Field(None, description="The same, as tabbyAPI's clients name it.")
    top_a: Number = None
    dynatemp_range: Number = Field(None, description="How much the temperature varies with the entropy.")
    dynatemp_exponent: Number = None
    temp_exponent: Number = Field(None, description="The same, as tabbyAPI's clients name it.")
    min_temp: Number = Field(None, description="With max_temp: the bounds of a temperature that varies.")
    max_temp: Number = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    dry_multiplier: Number = Field(None, description="0 is off.")
    dry_base: Number = None
    dry_allowed_length: Whole = None
    dry_penalty_last_n: Whole = Field(None, description="-1 is everything, 0 is off.")
    dry_range: Whole = Field(None, description="The same, as tabbyAPI's clients name it: 0 is everything.")
    dry_sequence_breakers: str | list[str] | None = None
    repetition_penalty: Number = None
    repeat_penalty: Number = Field(None, description="The same, as llama.cpp's clients name it.")
    repeat_last_n: Whole = Field(None, description="0 switches that penalty off; else it is over everything.")
    presence_penalty: Number = None
    frequency_penalty: Number = None
    end_penalty: Number = Field(None, description="Above 1 makes the end of the reply less likely.")
    logit_bias: dict[str, float] | None = None
    seed: Whole = Field(None, description="-1 is a random one.")
    steps: Whole = Field(None, description="Diffusion models: the steps of a block.")
    block_length: Whole = Field(None, description="Diffusion models: the tokens of a block.")
    remasking: str | None = Field(None, description="Diffusion models: confidence or entropy.")
    stop: Stop = Field(None, description="Strings or token ids; they apply to the answer only.")
    stop_token_ids: list[int] | None = None
    min_tokens: Whole = None
    max_tokens: Whole = Field(None, description="New tokens; -1 is no limit.")
    n_predict: Whole = Field(None, description="The same, as llama.cpp's clients name it.")
    banned_strings: str | list[str] | None = None
    banned_token_ids: list[int] | None = None
    return_token_ids: Switched = None
    user: str | None = Field(None, description="Ignored.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="Short for structured_outputs.")
    guided_regex: str | None = Field(None, description="Short for structured_outputs.")
    guided_choice: list[str] | None = Field(None, description="Short for structured_outputs.")
    guided_grammar: str | None = Field(None, description="Short for structured_outputs.")


class ChatRequest(SamplingFields):
    messages: list[ChatMessage]
    max_completion_tokens: Whole = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: Switched = None
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = Field(None, description="Short for response_format.")
    regex: str | None = Field(None, description="Short for response_format.")
    grammar: str | None = Field(None, description="Short for response_format.")
    logprobs: Switched = None
    top_logprobs: Whole = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["auto", "deepseek", "parsed", "none"] | None = None
    include_reasoning: Switched = None
    enable_thinking: Switched = None
    thinking: ThinkingOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: Whole = None
    thinking_budget_tokens: Whole = Field(None, description="The same.")
    thinking_token_budget: Whole = Field(None, description="The same.")
    reasoning_budget: Whole = Field(None, description="The same.")
    max_thinking_tokens: Whole = Field(None, description="The same.")
    chat_template_kwargs: dict[str, Any] | None = None
    template_vars: dict[str, Any] | None = Field(None, description="The same.")
    add_generation_prompt: Switched = Field(None, description="A new turn always has the template's; see the manual.")
    continue_final_message: bool | Literal["reasoning_content", "content"] | None = None
    response_prefix: str | None = None
    token_healing: Switched = None
    media: MediaOptions | None = None
    modalities: list[Literal["text", "audio"]] | None = Field(None, description="With audio the reply is spoken.")
    audio: AudioOptions | None = None
    metadata: dict[str, Any] | None = Field(None, description="`conversation` names one; the rest is ignored.")
    store: Switched = Field(None, description="Ignored: `metadata.conversation` keeps a reply.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: prompts are cached by their tokens.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prediction: dict[str, Any] | None = Field(None, description="Ignored.")
    web_search_options: dict[str, Any] | None = Field(None, description="Ignored.")


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Whole = None
    echo: Switched = None
    best_of: Whole = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None


class FillRequest(SamplingFields):
    text: str = Field(description="With masks: [MASK] is one token, [MASK:8] eight.")


class TokenizeRequest(RequestFields):
    model: str | None = None
    prompt: str | None = Field(None, description="Text; or messages.")
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Switched = None
    add_special_tokens: bool = Field(True, description="Whether to prepend the model's beginning-of-text token.")
    return_token_strs: Switched = None


class DetokenizeRequest(RequestFields):
    model: str | None = None
    tokens: list[int]


class RenderRequest(RequestFields):
    model: str | None = None
    messages: list[ChatMessage]
    tools: list[ChatTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Switched = None
    reasoning_effort: str | None = None
