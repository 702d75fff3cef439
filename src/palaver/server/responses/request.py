"""Converts a request of the Responses API into a `ChatRequest`, and into the record that is stored with the reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palaver.errors import BadParameter
from palaver.formats.base import Format
from palaver.server.openai.request import check_nested_fields, ignored_fields
from palaver.server.openai.sampling_params import ignores_effort
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
from palaver.store.encoding import ALTERNATIVES

FIELD_NAMES = {
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
"""Field names of the Responses API by the names that errors of the chat completion path use."""
_SHARED_FIELDS = (
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
    """Raises BadParameter for requests that are invalid with any model and any conversation."""
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
    shared: dict[str, Any] = {name: getattr(request, name) for name in _SHARED_FIELDS}
    tools, choice = _tools(request)
    logprobs = wants_logprobs(request)
    return ChatRequest(
        **shared,
        messages=list(messages),
        max_completion_tokens=request.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        response_format=_response_format(request.text.format if request.text is not None else None),
        logprobs=logprobs or None,
        top_logprobs=request.top_logprobs if logprobs else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
    )


def ignored_request_fields(request: ResponseRequest, settings: ServerSettings, format: Format) -> list[str]:
    """The names of the fields without effect."""
    ignored = ignored_fields(request)
    if request.text is not None and request.text.verbosity is not None:
        ignored.append("text.verbosity")
    if ignores_effort(to_chat_request(request, ()), settings, format):
        ignored.append("reasoning.effort")
    return ignored


def wants_logprobs(request: ResponseRequest) -> bool:
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


def to_record(request: ResponseRequest) -> ResponseRecord:
    reasoning, text = request.reasoning, request.text
    include = [str(name) for name in dict.fromkeys(request.include or ())]
    if wants_logprobs(request) and LOGPROBS not in include:
        include.append(LOGPROBS)
    record = ResponseRecord(
        asked=True,
        background=bool(request.background),
        metadata=request.metadata or {},
        instructions=request.instructions,
        tool_choice=_tool_choice_value(request),
        parallel=request.parallel_tool_calls is not False,
        strict=[tool.name for tool in request.tools or () if tool.strict],
        effort=reasoning.effort if reasoning is not None else None,
        summary=(reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        truncation=request.truncation or "disabled",
        include=include,
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
    )
    if text is None or text.format is None:
        return record
    return record.model_copy(update={"format": text.format.model_dump(by_alias=True, exclude_none=True)})


def _tool_choice_value(request: ResponseRequest) -> Any:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _tools(request: ResponseRequest) -> tuple[list[ChatTool] | None, Any]:
    """The tools and the tool choice. Tools that are not allowed are left out of the prompt."""
    tools = request.tools or []
    match request.tool_choice:
        case NamedTool(name=name):
            return _chat_tools(tools), NamedToolChoice(function=FunctionName(name=name))
        case AllowedTools(mode=mode, tools=allowed):
            names = [tool.name for tool in allowed]
            for name in names:
                if not any(tool.name == name for tool in tools):
                    raise BadParameter("tool_choice", name, "there is no such tool among the tools")
            return _chat_tools([tool for tool in tools if tool.name in names]), mode
        case choice:
            return _chat_tools(tools), choice


def _chat_tools(tools: Sequence[FunctionTool]) -> list[ChatTool] | None:
    functions = [
        FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        for tool in tools
    ]
    return [ChatTool(type="function", function=function) for function in functions] or None


def _response_format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return ResponseFormat.model_validate({"type": "json_object"})
    if format.schema_ is None:
        raise BadParameter("text.format.schema", None, "must hold a schema")
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": format.schema_}})
