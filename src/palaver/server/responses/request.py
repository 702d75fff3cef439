"""What a request for a response wants, in the words of a chat completion: both doors mean the same by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palaver.errors import BadParameter
from palaver.formats.base import Format
from palaver.server.openai.sampling_params import check_nested_fields, ignored_fields, ignores_effort
from palaver.server.openai.schemas import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    ResponseFormat,
)
from palaver.server.responses.history import ResponseRecord
from palaver.server.responses.schemas import (
    LOGPROBS,
    MAX_METADATA,
    MAX_NAME,
    MAX_VALUE,
    AllowedTools,
    FunctionTool,
    NamedTool,
    ResponseRequest,
    TextFormat,
)
from palaver.server.settings import ServerSettings
from palaver.store.token_codec import ALTERNATIVES

THEIRS = {
    "enable_thinking": "enable_thinking",
    "think": "enable_thinking",
    "effort": "reasoning.effort",
    "reasoning_effort": "reasoning.effort",
    "budget": "thinking_budget",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "stop_ids": "stop",
    "stop_token_ids": "stop",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "constraint": "text.format",
    "constraint (json_schema)": "text.format",
    "constraint (lark)": "tools",
}
"""Our names, and a chat completion's, by those of a response's fields."""
_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "end_penalty",
    "logit_bias",
    "seed",
    "stop",
    "min_tokens",
    "banned_strings",
    "parallel_tool_calls",
    "enable_thinking",
    "thinking_budget",
    "chat_template_kwargs",
)


def check_request(request: ResponseRequest) -> None:
    """Raises BadParameter for what can't be, whatever the model and the conversation are."""
    check_nested_fields(request)
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise BadParameter("metadata", f"{len(metadata)} pairs", f"at most {MAX_METADATA} are taken")
    for name, value in metadata.items():
        if len(name) > MAX_NAME or len(value) > MAX_VALUE:
            raise BadParameter(
                "metadata", name[:MAX_NAME], f"names have up to {MAX_NAME} characters, values {MAX_VALUE}"
            )
    if request.store is False:
        _check_stateless(request)
    elif (request.top_logprobs or 0) > ALTERNATIVES:
        why = f"of a response that is stored {ALTERNATIVES} are kept: ask with store false for more"
        raise BadParameter("top_logprobs", request.top_logprobs, why)
    if request.previous_response_id is not None and request.conversation is not None:
        raise BadParameter("previous_response_id", request.previous_response_id[:80], "contradicts conversation")


def _check_stateless(request: ResponseRequest) -> None:
    if request.background:
        raise BadParameter("background", True, "needs store: whoever asked must be able to come back for it")
    if request.conversation is not None:
        raise BadParameter("store", False, "what belongs to a conversation is stored")


def to_chat_request(request: ResponseRequest, messages: Sequence[ChatMessage]) -> ChatRequest:
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    tools, choice = _tools(request)
    counts = wants_logprobs(request)
    return ChatRequest(
        **given,
        messages=list(messages),
        max_completion_tokens=request.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        response_format=_format(request.text.format if request.text is not None else None),
        logprobs=counts or None,
        top_logprobs=request.top_logprobs if counts else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
    )


def ignored_of(request: ResponseRequest, settings: ServerSettings, format: Format) -> list[str]:
    """The fields without effect."""
    ignored = ignored_fields(request)
    if request.text is not None and request.text.verbosity is not None:
        ignored.append("text.verbosity")
    if ignores_effort(to_chat_request(request, ()), settings, format):
        ignored.append("reasoning.effort")
    return ignored


def wants_logprobs(request: ResponseRequest) -> bool:
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


def to_record(request: ResponseRequest) -> ResponseRecord:
    wish, text = request.reasoning, request.text
    include = [str(one) for one in dict.fromkeys(request.include or ())]
    if wants_logprobs(request) and LOGPROBS not in include:
        include.append(LOGPROBS)
    told = ResponseRecord(
        asked=True,
        background=bool(request.background),
        metadata=request.metadata or {},
        instructions=request.instructions,
        tool_choice=_told_choice(request),
        parallel=request.parallel_tool_calls is not False,
        strict=[tool.name for tool in request.tools or () if tool.strict],
        effort=wish.effort if wish is not None else None,
        summary=(wish.summary or wish.generate_summary) if wish is not None else None,
        truncation=request.truncation or "disabled",
        include=include,
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
    )
    if text is None or text.format is None:
        return told
    return told.model_copy(update={"format": text.format.model_dump(by_alias=True, exclude_none=True)})


def _told_choice(request: ResponseRequest) -> Any:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _tools(request: ResponseRequest) -> tuple[list[ChatTool] | None, Any]:
    """The tools, and which must be called. Of those that are not allowed the model is not told."""
    tools = request.tools or []
    match request.tool_choice:
        case NamedTool(name=name):
            return _offered(tools), NamedToolChoice(function=FunctionName(name=name))
        case AllowedTools(mode=mode, tools=allowed):
            names = [tool.name for tool in allowed]
            for name in names:
                if not any(tool.name == name for tool in tools):
                    raise BadParameter("tool_choice", name, "there is no such tool among the tools")
            return _offered([tool for tool in tools if tool.name in names]), mode
        case choice:
            return _offered(tools), choice


def _offered(tools: Sequence[FunctionTool]) -> list[ChatTool] | None:
    functions = [
        FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        for tool in tools
    ]
    return [ChatTool(type="function", function=function) for function in functions] or None


def _format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return ResponseFormat.model_validate({"type": "json_object"})
    if format.schema_ is None:
        raise BadParameter("text.format.schema", None, "must hold a schema")
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": format.schema_}})
