"""Messages and tools of OpenAI's chat API as Palaver's `Message` and `Tool`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaver.errors import BadParameter, NothingToContinue
from palaver.messages import Message, Part, Role, Text, Thinking, Tool, ToolCall, ToolResult
from palaver.server.openai.schemas import ChatMessage, ChatRequest, ChatTool, FunctionDefinition
from palaver.transcripts.openai import from_openai


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The messages of a request, and the partial reply that it asks to continue."""

    messages: tuple[Message, ...]
    past: tuple[tuple[int, ...] | None, ...]
    """The token ids of the replies among the messages, if they were sent."""
    partial: Message | None = None
    partial_ids: tuple[int, ...] | None = None
    """The token ids of the partial reply, if they were sent."""


def parse_history(request: ChatRequest, limit: int) -> ChatHistory:
    if len(request.messages) > limit:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {limit} are taken")
    messages = parse_messages(request.messages)
    ids = [message.token_ids for message in request.messages]
    last = request.messages[-1] if request.messages else None
    mode = request.continue_final_message
    if last is not None and continues(request):
        before = messages[:-1]
        if mode is None and last.token_ids is None:
            _check_prefill(messages[-1])
            if not any(map(_has_content, messages[-1].parts)):
                return ChatHistory(before, _past(before, ids))
        partial_ids = None if last.token_ids is None else tuple(last.token_ids)
        return ChatHistory(before, _past(before, ids), _partial(messages[-1], mode or True), partial_ids)
    if mode:
        raise NothingToContinue("continue_final_message: the last message is not the assistant's.")
    return ChatHistory(messages, _past(messages, ids))


def continues(request: ChatRequest) -> bool:
    """Whether the last message is a reply that is to be continued."""
    last = request.messages[-1] if request.messages else None
    return last is not None and last.role == "assistant" and request.continue_final_message is not False


def _check_prefill(message: Message) -> None:
    """A trailing assistant message is continued, unless what must follow it is the result of its call."""
    if message.tool_calls:
        why = "the last message calls a tool: its result must follow, or continue_final_message to continue the call"
        raise BadParameter("messages", "tool_calls", why)


def _has_content(part: Part) -> bool:
    return not isinstance(part, Text | Thinking) or bool(part.text)


def parse_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    names: dict[str, str] = {}
    parsed = []
    for index, chat_message in enumerate(messages):
        message = _message(index, chat_message)
        names.update((call.id, call.name) for call in message.tool_calls)
        parsed.append(_with_tool_names(message, names))
    return tuple(parsed)


def parse_tools(
    tools: Sequence[ChatTool] | None, functions: Sequence[FunctionDefinition] | None, limit: int
) -> tuple[Tool, ...]:
    offered = [*(tool.function for tool in tools or ()), *(functions or ())]
    if len(offered) > limit:
        raise BadParameter("tools", f"{len(offered)} tools", f"at most {limit} are taken")
    names = [function.name for function in offered]
    for name in names:
        if names.count(name) > 1:
            raise BadParameter("tools", name, "two tools have this name")
    return tuple(Tool(f.name, f.description or "", f.parameters or {"type": "object"}) for f in offered)


def _past(messages: Sequence[Message], ids: Sequence[list[int] | None]) -> tuple[tuple[int, ...] | None, ...]:
    replies = zip(messages, ids, strict=False)
    return tuple(None if sent is None else tuple(sent) for message, sent in replies if message.role is Role.ASSISTANT)


def _message(index: int, message: ChatMessage) -> Message:
    value = message.model_dump(exclude_none=True, exclude={"token_ids", "refusal", "function_call"})
    if message.function_call is not None:
        value["tool_calls"] = [{"id": "", "function": message.function_call.model_dump()}]
    if message.refusal and not message.content:
        value["content"] = message.refusal
    if message.audio is not None:
        raise BadParameter(
            f"messages[{index}].audio", message.audio.id, "recordings are known to chat completions alone"
        )
    if message.role in ("tool", "function") and message.content is None:
        raise BadParameter(f"messages[{index}].content", None, "a tool's result needs a content")
    try:
        return from_openai(value)
    except (ValueError, KeyError, TypeError) as error:
        raise BadParameter(f"messages[{index}]", "...", str(error)) from None


def _with_tool_names(message: Message, names: dict[str, str]) -> Message:
    """Adds the tool's name to its results: some templates need it, and clients leave it out."""
    parts = (
        replace(part, name=names.get(part.call_id, "")) if isinstance(part, ToolResult) and not part.name else part
        for part in message.parts
    )
    return Message(message.role, tuple(parts))


def _partial(message: Message, mode: bool | str) -> Message:
    """The message as the reply to continue. A last part of thinking is open; an empty text after it closes it."""
    thinks = any(isinstance(part, Thinking) for part in message.parts)
    rest = [part for part in message.parts if isinstance(part, Text | ToolCall)]
    if mode == "reasoning_content":
        if rest:
            raise BadParameter("continue_final_message", mode, "the thought is closed: there is an answer after it")
        return message if thinks else Message(Role.ASSISTANT, (Thinking(""),))
    if mode == "content" and not rest:
        return Message(Role.ASSISTANT, (*message.parts, Text("")))
    return message
