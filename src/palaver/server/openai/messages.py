"""Messages as OpenAI's clients send them, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaver.errors import BadParameter, NothingToContinue
from palaver.messages import Message, Part, Role, Text, Thinking, Tool, ToolCall, ToolResult
from palaver.server.openai.schemas import ChatMessage, ChatRequest, ChatTool, FunctionDefinition
from palaver.transcripts.openai import from_openai


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The conversation so far, and the reply that was begun where one is to go on."""

    messages: tuple[Message, ...]
    past: tuple[tuple[int, ...] | None, ...]
    """The token ids of the replies among the messages, where they were sent."""
    begun: Message | None = None
    said: tuple[int, ...] | None = None
    """The ids of the begun reply, where they were sent."""


def parse_history(request: ChatRequest, most: int) -> ChatHistory:
    if len(request.messages) > most:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {most} are taken")
    messages = parse_messages(request.messages)
    ids = [message.token_ids for message in request.messages]
    last = request.messages[-1] if request.messages else None
    wanted = request.continue_final_message
    if last is not None and continues(request):
        before = messages[:-1]
        if wanted is None and last.token_ids is None:
            _check_prefill(messages[-1])
            if not any(map(_is_said, messages[-1].parts)):
                return ChatHistory(before, _past(before, ids))
        said = None if last.token_ids is None else tuple(last.token_ids)
        return ChatHistory(before, _past(before, ids), _begun(messages[-1], wanted or True), said)
    if wanted:
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


def _is_said(part: Part) -> bool:
    return not isinstance(part, Text | Thinking) or bool(part.text)


def parse_messages(given: Sequence[ChatMessage]) -> tuple[Message, ...]:
    names: dict[str, str] = {}
    found = []
    for place, one in enumerate(given):
        message = _message(place, one)
        names.update((call.id, call.name) for call in message.tool_calls)
        found.append(_named(message, names))
    return tuple(found)


def parse_tools(
    tools: Sequence[ChatTool] | None, functions: Sequence[FunctionDefinition] | None, most: int
) -> tuple[Tool, ...]:
    offered = [*(tool.function for tool in tools or ()), *(functions or ())]
    if len(offered) > most:
        raise BadParameter("tools", f"{len(offered)} tools", f"at most {most} are taken")
    names = [function.name for function in offered]
    for name in names:
        if names.count(name) > 1:
            raise BadParameter("tools", name, "two tools have this name")
    return tuple(Tool(f.name, f.description or "", f.parameters or {"type": "object"}) for f in offered)


def _past(messages: Sequence[Message], ids: Sequence[list[int] | None]) -> tuple[tuple[int, ...] | None, ...]:
    replies = zip(messages, ids, strict=False)
    return tuple(
        None if known is None else tuple(known) for message, known in replies if message.role is Role.ASSISTANT
    )


def _message(place: int, one: ChatMessage) -> Message:
    value = one.model_dump(exclude_none=True, exclude={"token_ids", "refusal", "function_call"})
    if one.function_call is not None:
        value["tool_calls"] = [{"id": "", "function": one.function_call.model_dump()}]
    if one.refusal and not one.content:
        value["content"] = one.refusal
    if one.audio is not None:
        raise BadParameter(f"messages[{place}].audio", one.audio.id, "recordings are known to chat completions alone")
    if one.role in ("tool", "function") and one.content is None:
        raise BadParameter(f"messages[{place}].content", None, "a tool's result needs a content")
    try:
        return from_openai(value)
    except (ValueError, KeyError, TypeError) as error:
        raise BadParameter(f"messages[{place}]", "...", str(error)) from None


def _named(message: Message, names: dict[str, str]) -> Message:
    """Some templates want the name of the tool whose result this is, which clients leave out."""
    parts = (
        replace(part, name=names.get(part.call_id, "")) if isinstance(part, ToolResult) and not part.name else part
        for part in message.parts
    )
    return Message(message.role, tuple(parts))


def _begun(message: Message, wanted: bool | str) -> Message:
    """As much of it as is to go on: an open thought has nothing after it, a closed one has an answer, even an empty."""
    thinks = any(isinstance(part, Thinking) for part in message.parts)
    rest = [part for part in message.parts if isinstance(part, Text | ToolCall)]
    if wanted == "reasoning_content":
        if rest:
            raise BadParameter("continue_final_message", wanted, "the thought is closed: there is an answer after it")
        return message if thinks else Message(Role.ASSISTANT, (Thinking(""),))
    if wanted == "content" and not rest:
        return Message(Role.ASSISTANT, (*message.parts, Text("")))
    return message
