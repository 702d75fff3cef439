"""Items and messages: what a request's input says as messages of a chat, and what was said as items again."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from typing import Any

from palaver.chat.interface import Chat
from palaver.errors import BadParameter, NoMessages
from palaver.messages import Message, Role, Text, Thinking, ToolCall, ToolResult
from palaver.server.openai.schemas import ChatMessage, FunctionCall, MessageToolCall
from palaver.server.responses.schemas import InputContent, InputItem
from palaver.store import NotFound, StoredMessage
from palaver.store.json_values import StoredPart

_SEAL = "thought."
_OURS = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-z]{1,64})_([0-9]{1,6})")
_KINDS = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco"}


def encrypt_thinking(thought: str) -> str:
    """A thought for clients that hand it back without looking at it. It hides nothing."""
    return _SEAL + base64.urlsafe_b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def item_id(kind: str, message: str, place: int) -> str:
    """Says which item of which message it is, so that it is found again by its id alone."""
    return f"{_KINDS[kind]}_{message}_{place}"


def chat_messages(items: Sequence[InputItem] | str | None) -> list[ChatMessage]:
    """The input as messages. What the assistant thought, said and called without a break is one message."""
    if items is None or items == "" or items == []:
        raise NoMessages
    if isinstance(items, str):
        return [_chat("user", content=items)]
    found: list[ChatMessage] = []
    for place, item in enumerate(items):
        message = _message(f"input[{place}]", item)
        if found and message.role == "assistant" and found[-1].role == "assistant":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def check_answerable(messages: Sequence[ChatMessage]) -> None:
    """BadParameter where the input ends with what the assistant said: a stored response has an output of its own."""
    if messages[-1].role == "assistant":
        why = "the last item is the assistant's: it is continued with store false alone"
        raise BadParameter("input", messages[-1].role, why)


async def resolve_references(chat: Chat, items: Sequence[InputItem] | str | None) -> Sequence[InputItem] | str | None:
    """References are the items that they name."""
    if items is None or isinstance(items, str):
        return items
    return [await _named(chat, f"input[{place}]", item) for place, item in enumerate(items)]


def message_items(message: str, role: Role, parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    """A message of the branch as items."""
    if role is Role.ASSISTANT:
        return _said_items(message, parts)
    if role is Role.TOOL:
        results = [part for part in parts if isinstance(part, ToolResult)]
        return [_result_item(message, place, result) for place, result in enumerate(results)]
    content = [{"type": "input_text", "text": part.text} for part in parts if isinstance(part, Text)]
    about = {"id": item_id("message", message, 0), "type": "message", "role": role.value, "status": "completed"}
    return [{**about, "content": content}]


def _said_items(message: str, parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for part in parts:
        place = len(items)
        match part:
            case Thinking(text):
                items.append(reasoning_item(item_id("reasoning", message, place), text))
            case Text(text):
                items.append(message_item(item_id("message", message, place), text))
            case ToolCall(id, name, arguments):
                items.append(function_call_item(item_id("function_call", message, place), id, name, arguments))
    return items


def reasoning_item(
    id: str, text: str, status: str = "completed", as_summary: bool = False, seal: bool = False
) -> dict[str, Any]:
    told = [{"type": "summary_text" if as_summary else "reasoning_text", "text": text}] if text else []
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": told if as_summary else []}
    if not as_summary:
        item["content"] = told
    return {**item, "encrypted_content": encrypt_thinking(text)} if seal and text else item


def message_item(
    id: str, text: str, status: str = "completed", logprobs: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    about = {"id": id, "type": "message", "role": "assistant", "status": status}
    return {**about, "content": [text_part(text, logprobs)] if text else []}


def text_part(text: str, logprobs: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs or ())}


def function_call_item(id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    about = {"id": id, "type": "function_call", "status": status}
    return {**about, "call_id": call_id, "name": name, "arguments": arguments}


def _result_item(message: str, place: int, result: ToolResult) -> dict[str, Any]:
    about = {"id": item_id("function_call_output", message, place), "type": "function_call_output"}
    return {**about, "call_id": result.call_id, "output": result.content, "status": "completed"}


async def _named(chat: Chat, where: str, item: InputItem) -> InputItem:
    if item.type != "item_reference" and not (item.type is None and item.role is None and item.id is not None):
        return item
    id = item.id or ""
    try:
        stored = await _message_of(chat, id)
    except NotFound:
        raise BadParameter(f"{where}.id", id[:80], "there is no such item") from None
    for value in message_items(stored.id, stored.role, stored.parts):
        if value["id"] == id:
            return InputItem.model_validate(value)
    raise BadParameter(f"{where}.id", id[:80], "there is no such item")


async def _message_of(chat: Chat, id: str) -> StoredMessage:
    named = _OURS.fullmatch(id)
    if named is None:
        raise NotFound("item", id)
    return await chat.message(named[1])


def _message(where: str, item: InputItem) -> ChatMessage:
    match item.type:
        case "reasoning":
            return _chat("assistant", reasoning_content=_thought(where, item))
        case "function_call":
            function = FunctionCall(name=_needed(where, "name", item.name), arguments=item.arguments or "")
            call = MessageToolCall(id=_needed(where, "call_id", item.call_id), function=function)
            return _chat("assistant", tool_calls=[call])
        case "function_call_output":
            content = _content(f"{where}.output", _needed(where, "output", item.output))
            return _chat("tool", tool_call_id=_needed(where, "call_id", item.call_id), content=content)
        case _:
            role = _needed(where, "role", item.role)
            return _chat(role, content=_content(f"{where}.content", _needed(where, "content", item.content)))


def _chat(role: str, **fields: Any) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, **fields})


def _needed(where: str, name: str, value: Any) -> Any:
    if value is None:
        raise BadParameter(f"{where}.{name}", None, "is needed here")
    return value


def _thought(where: str, item: InputItem) -> str:
    """As it was told, in whichever of its forms comes back."""
    told = [*(item.content if isinstance(item.content, list) else ())] or item.summary or []
    if told or not item.encrypted_content:
        return "".join(part.text or "" for part in told)
    try:
        if not item.encrypted_content.startswith(_SEAL):
            raise ValueError
        return base64.urlsafe_b64decode(item.encrypted_content[len(_SEAL) :]).decode("utf-8")
    except (ValueError, binascii.Error):
        raise BadParameter(f"{where}.encrypted_content", "...", "was not made here, so it can't be read") from None


def _content(where: str, content: str | list[InputContent]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    return [_part(f"{where}[{place}]", part) for place, part in enumerate(content)]


def _part(where: str, part: InputContent) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return {"type": "text", "text": _needed(where, "text", part.text)}
        case "refusal":
            return {"type": "text", "text": _needed(where, "refusal", part.refusal)}
        case "input_image":
            return {"type": "image_url", "image_url": {"url": _needed(where, "image_url", part.image_url)}}
        case _:
            raise BadParameter(f"{where}.type", part.type[:80], "such a part can't be taken here")


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Two pieces of what the assistant said as one."""
    thought = (first.reasoning_content or "") + (second.reasoning_content or "")
    said = [*_listed(first.content), *_listed(second.content)]
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    return _chat("assistant", content=said or None, reasoning_content=thought or None, tool_calls=calls or None)


def _listed(content: str | list[Any] | None) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or []


def split_system(messages: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """The text of the system messages at the beginning, and what comes after them."""
    first = next((place for place, one in enumerate(messages) if one.role is not Role.SYSTEM), len(messages))
    return "\n\n".join(message.text for message in messages[:first]), tuple(messages[first:])
