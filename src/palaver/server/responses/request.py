"""From a request of the Responses API to a `ChatRequest`, with its input items as messages, and to the record that is
stored with the reply."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from palaver.chat.attachments import PICTURE_FOLLOWS
from palaver.chat.interface import ServerChat
from palaver.errors import BadParameter, NoMessages
from palaver.formats.base import Format
from palaver.messages import ToolCall
from palaver.server.openai.request import check_nested_fields, ignored_fields
from palaver.server.openai.sampling_params import ignores_effort
from palaver.server.openai.schemas import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    MessageToolCall,
    NamedToolChoice,
    ResponseFormat,
)
from palaver.server.responses.encoder import ENCRYPTED_PREFIX, message_items
from palaver.server.responses.history import ResponseRecord
from palaver.server.responses.schemas import (
    LOGPROBS,
    MAX_METADATA,
    MAX_NAME,
    MAX_VALUE,
    AllowedTools,
    FunctionTool,
    InputContent,
    InputItem,
    McpTool,
    McpToolChoice,
    NamedTool,
    ResponseRequest,
    TextFormat,
)
from palaver.server.settings import ServerSettings
from palaver.store import Blob, NotFound, StoredMessage
from palaver.store.encoding import ALTERNATIVES

FIELD_NAMES = {
    "must_call": "tool_choice",
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
    "steps",
    "block_length",
    "remasking",
    "stop",
    "min_tokens",
    "banned_strings",
    "parallel_tool_calls",
    "enable_thinking",
    "thinking_budget",
    "chat_template_kwargs",
    "media",
)


def check_request(request: ResponseRequest) -> None:
    """Raises BadParameter for requests that are invalid with any model and any conversation."""
    check_nested_fields(request)
    check_metadata(request.metadata)
    if request.store is False:
        _check_stateless(request)
    elif (request.top_logprobs or 0) > ALTERNATIVES:
        why = f"of a response that is stored {ALTERNATIVES} are kept: ask with store false for more"
        raise BadParameter("top_logprobs", request.top_logprobs, why)
    if request.previous_response_id is not None and request.conversation is not None:
        raise BadParameter("previous_response_id", request.previous_response_id[:80], "contradicts conversation")


def check_metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    """The metadata. Raises BadParameter if they are too many or too long."""
    metadata = metadata or {}
    if len(metadata) > MAX_METADATA:
        raise BadParameter("metadata", f"{len(metadata)} pairs", f"at most {MAX_METADATA} are taken")
    for name, value in metadata.items():
        if len(name) > MAX_NAME or len(value) > MAX_VALUE:
            raise BadParameter(
                "metadata", name[:MAX_NAME], f"names have up to {MAX_NAME} characters, values {MAX_VALUE}"
            )
    return metadata


def _check_stateless(request: ResponseRequest) -> None:
    if request.background:
        raise BadParameter("background", True, "needs store: a background response is retrieved later")
    if request.conversation is not None:
        raise BadParameter("store", False, "responses of a conversation are always stored")
    if mcp_tools(request):
        raise BadParameter("store", False, "tools of the type mcp need store: their calls and approvals are kept")


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
        strict=[tool.name for tool in _functions(request) if tool.strict],
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
    tools = _functions(request)
    match request.tool_choice:
        case NamedTool(name=name):
            return _chat_tools(tools), NamedToolChoice(function=FunctionName(name=name))
        case AllowedTools(mode=mode, tools=allowed):
            names = [tool.name for tool in allowed]
            for name in names:
                if not any(tool.name == name for tool in tools):
                    raise BadParameter("tool_choice", name, "there is no such tool among the tools")
            return _chat_tools([tool for tool in tools if tool.name in names]), mode
        case McpToolChoice():
            return _chat_tools(tools), None
        case "required" if mcp_tools(request):
            return _chat_tools(tools), None
        case choice:
            return _chat_tools(tools), choice


def _functions(request: ResponseRequest) -> list[FunctionTool]:
    return [tool for tool in request.tools or () if isinstance(tool, FunctionTool)]


def mcp_tools(request: ResponseRequest) -> list[McpTool]:
    return [tool for tool in request.tools or () if isinstance(tool, McpTool)]


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
        raise BadParameter("text.format.schema", None, "must contain a schema")
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": format.schema_}})


_CALL_ID = re.compile(r"mcp_([0-9a-z]{1,64})_([0-9]{1,6})")
_ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-z]{1,64})_([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class InputMessages:
    """The input as messages."""

    messages: Sequence[ChatMessage] = ()
    places: Sequence[str] = ()
    """The first item of each message, as errors name it."""


def convert_input(items: Sequence[InputItem] | str | None) -> InputMessages:
    """The input as messages. Consecutive items of the assistant (reasoning, text, calls) become one message.

    Pictures of results follow the last of them as a message of the user: templates have no place for them inside."""
    if items is None or items == []:
        raise NoMessages
    if isinstance(items, str):
        return InputMessages([_chat_message("user", content=items)], ["input"])
    messages: list[ChatMessage] = []
    places: list[str] = []
    round: tuple[str, int] | None = None
    """The reply of the calls of servers before, and the index of its message."""
    pictures: list[Any] = []
    where = pictured = ""
    for index, item in enumerate(items):
        places += [where] * (len(messages) - len(places))
        where = f"input[{index}]"
        if item.type in ("mcp_list_tools", "mcp_approval_request"):
            continue
        if pictures and item.type != "function_call_output":
            messages.append(_chat_message("user", content=pictures))
            places.append(pictured)
            pictures = []
        if item.type == "mcp_call":
            call, result = _server_call(where, item)
            reply = (item.id or "").rpartition("_")[0]
            if round is not None and round[0] == reply:
                messages[round[1]] = _merge(messages[round[1]], call)
            else:
                _append(messages, call)
                round = (reply, len(messages) - 1)
            messages.append(result)
            continue
        round = None
        if item.type == "function_call_output":
            result, shown = _result(where, item)
            messages.append(result)
            pictured = pictured if pictures else where
            pictures += shown
            continue
        _append(messages, _message(where, item))
    places += [where] * (len(messages) - len(places))
    if pictures:
        messages.append(_chat_message("user", content=pictures))
        places.append(pictured)
    if not messages:
        raise NoMessages
    return InputMessages(messages, places)


def _append(messages: list[ChatMessage], message: ChatMessage) -> None:
    if messages and message.role == "assistant" and messages[-1].role == "assistant":
        messages[-1] = _merge(messages[-1], message)
    else:
        messages.append(message)


def _result(where: str, item: InputItem) -> tuple[ChatMessage, list[Any]]:
    """The result of a call, and its pictures."""
    output = _require(where, "output", item.output)
    parts = [] if isinstance(output, str) else output
    named = [(part.type, _part(f"{where}.output[{index}]", part)) for index, part in enumerate(parts)]
    pictures = [part for kind, part in named if kind == "input_image"]
    content: Any = output if isinstance(output, str) else [part for kind, part in named if kind != "input_image"]
    if pictures:
        content.append({"type": "text", "text": f"\n\n{PICTURE_FOLLOWS}" if content else PICTURE_FOLLOWS})
    return _chat_message("tool", tool_call_id=_require(where, "call_id", item.call_id), content=content), pictures


def _server_call(where: str, item: InputItem) -> tuple[ChatMessage, ChatMessage]:
    """A call of a server's tool and its result."""
    id = item.call_id or _require(where, "id", item.id)
    function = FunctionCall(name=_require(where, "name", item.name), arguments=item.arguments or "")
    call = _chat_message("assistant", tool_calls=[MessageToolCall(id=id, function=function)])
    content = _content(f"{where}.output", item.output) if item.output is not None else _error_text(item.error)
    return call, _chat_message("tool", tool_call_id=id, content=content)


def _error_text(error: Any) -> str:
    match error:
        case {"content": [{"text": str(text)}]} | {"message": str(text)} | {"content": str(text)} | str(text):
            return text
        case _:
            return ""


def only_instructions(request: ResponseRequest) -> bool:
    """Whether a new conversation begins with a reply to the instructions."""
    follows = request.previous_response_id is not None or request.conversation is not None
    return bool(request.instructions) and not request.input and request.input != "" and not follows


def check_answerable(messages: Sequence[ChatMessage]) -> None:
    """Raises BadParameter if the input ends with an item of the assistant: a stored response does not continue one."""
    if messages and messages[-1].role == "assistant":
        why = "the last item is the assistant's: it is continued with store false alone"
        raise BadParameter("input", messages[-1].role, why)


async def load_items(chat: ServerChat, messages: Sequence[StoredMessage]) -> list[dict[str, Any]]:
    """Stored messages as items, with their media."""
    loaded = zip(messages, await chat.load_messages(messages), strict=True)
    return [item for stored, message in loaded for item in message_items(stored.id, stored.role, message.parts)]


def media_bytes(message: StoredMessage) -> int:
    return sum(part.size for part in message.parts if isinstance(part, Blob))


async def resolve_references(
    chat: ServerChat, items: Sequence[InputItem] | str | None, max_bytes: int
) -> Sequence[InputItem] | str | None:
    """Replaces item references by the stored items that they name, and gives stored calls their ids. `max_bytes`: of
    the media of these items. References are short: without a limit, one request could load any number of files."""
    if items is None or isinstance(items, str):
        return items
    resolved: list[InputItem] = []
    for index, item in enumerate(items):
        found, size = await _resolve_reference(chat, f"input[{index}]", item, max_bytes)
        resolved.append(found)
        max_bytes -= size
    return resolved


async def _resolve_reference(chat: ServerChat, where: str, item: InputItem, max_bytes: int) -> tuple[InputItem, int]:
    """The item, and the bytes of the media that were loaded for it."""
    if item.type == "mcp_call" and (match := _CALL_ID.fullmatch(item.id or "")):
        with suppress(NotFound):
            reply, round = await chat.message(match[1]), await chat.tool_round(match[1])
            ids = [call.call_id for call in round.calls if call.position == int(match[2])] if round is not None else []
            for part in reply.parts:
                if isinstance(part, ToolCall) and part.id in ids:
                    named = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
                    return item.model_copy(update=named), 0
        return item, 0
    if item.type != "item_reference" and not (item.type is None and item.role is None and item.id is not None):
        return item, 0
    id = item.id or ""
    try:
        stored = await _stored_message(chat, id)
    except NotFound:
        raise BadParameter(f"{where}.id", id[:80], "there is no such item") from None
    size = media_bytes(stored)
    if size > max_bytes:
        raise BadParameter(f"{where}.id", id[:80], "the media of the items that are referred to are too large together")
    for value in await load_items(chat, [stored]):
        if value["id"] == id:
            return InputItem.model_validate(value), size
    raise BadParameter(f"{where}.id", id[:80], "there is no such item")


async def _stored_message(chat: ServerChat, id: str) -> StoredMessage:
    match = _ITEM_ID.fullmatch(id)
    if match is None:
        raise NotFound("item", id)
    return await chat.message(match[1])


def _message(where: str, item: InputItem) -> ChatMessage:
    match item.type:
        case "reasoning":
            return _chat_message("assistant", reasoning_content=_thinking(where, item))
        case "function_call":
            function = FunctionCall(name=_require(where, "name", item.name), arguments=item.arguments or "")
            call = MessageToolCall(id=_require(where, "call_id", item.call_id), function=function)
            return _chat_message("assistant", tool_calls=[call])
        case _:
            role = _require(where, "role", item.role)
            return _chat_message(role, content=_content(f"{where}.content", _require(where, "content", item.content)))


def _chat_message(role: str, **fields: Any) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, **fields})


def _require(where: str, name: str, value: Any) -> Any:
    if value is None:
        raise BadParameter(f"{where}.{name}", None, "is needed here")
    return value


def _thinking(where: str, item: InputItem) -> str:
    """The text of a reasoning item: its content, its summary, or its encrypted content."""
    parts = [*(item.content if isinstance(item.content, list) else ())] or item.summary or []
    if parts or not item.encrypted_content:
        return "".join(part.text or "" for part in parts)
    try:
        if not item.encrypted_content.startswith(ENCRYPTED_PREFIX):
            raise ValueError
        return base64.urlsafe_b64decode(item.encrypted_content[len(ENCRYPTED_PREFIX) :]).decode("utf-8")
    except (ValueError, binascii.Error):
        raise BadParameter(f"{where}.encrypted_content", "...", "was not created by this server") from None


def _content(where: str, content: str | list[InputContent]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]


def _part(where: str, part: InputContent) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return {"type": "text", "text": _require(where, "text", part.text)}
        case "refusal":
            return {"type": "text", "text": _require(where, "refusal", part.refusal)}
        case "input_image":
            return {"type": "image_url", "image_url": {"url": _require(where, "image_url", part.image_url)}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": _require(where, "input_audio", part.input_audio)}
        case "input_file" if part.file_url is not None:
            return {"type": "file", "file": {"file_data": part.file_url, "filename": part.filename}}
        case "input_file":
            data = _require(where, "file_data", part.file_data)
            return {"type": "file", "file": {"file_data": data, "filename": part.filename}}
        case _:
            raise BadParameter(f"{where}.type", part.type[:80], "this type of part is not supported here")


def _merge(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Merges two consecutive messages of the assistant."""
    thinking = (first.reasoning_content or "") + (second.reasoning_content or "")
    content = [*_content_parts(first.content), *_content_parts(second.content)]
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    return _chat_message(
        "assistant", content=content or None, reasoning_content=thinking or None, tool_calls=calls or None
    )


def _content_parts(content: str | list[Any] | None) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or []
