"""Conversion between the items of the Responses API and messages: input items to messages, stored messages to items."""

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
from palaver.store.encoding import StoredPart

_ENCRYPTED_PREFIX = "thought."
_ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-z]{1,64})_([0-9]{1,6})")
_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco"}


def encrypt_thinking(thinking: str) -> str:
    """An opaque form of the thinking that clients send back unread. It is encoded, not secret."""
    return _ENCRYPTED_PREFIX + base64.urlsafe_b64encode(thinking.encode("utf-8", "surrogatepass")).decode()


def item_id(kind: str, message: str, index: int) -> str:
    """The id names the message and the item's index in it, so that the item is found by its id alone."""
    return f"{_ID_PREFIXES[kind]}_{message}_{index}"


def chat_messages(items: Sequence[InputItem] | str | None) -> list[ChatMessage]:
    """The input as messages. Consecutive items of the assistant (reasoning, text, calls) become one message."""
    if items is None or items == "" or items == []:
        raise NoMessages
    if isinstance(items, str):
        return [_chat_message("user", content=items)]
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        message = _message(f"input[{index}]", item)
        if messages and message.role == "assistant" and messages[-1].role == "assistant":
            messages[-1] = _merge(messages[-1], message)
        else:
            messages.append(message)
    return messages


def check_answerable(messages: Sequence[ChatMessage]) -> None:
    """Raises BadParameter if the input ends with an item of the assistant: a stored response does not continue one."""
    if messages[-1].role == "assistant":
        why = "the last item is the assistant's: it is continued with store false alone"
        raise BadParameter("input", messages[-1].role, why)


async def resolve_references(chat: Chat, items: Sequence[InputItem] | str | None) -> Sequence[InputItem] | str | None:
    """Replaces item references by the stored items that they name."""
    if items is None or isinstance(items, str):
        return items
    return [await _resolve_reference(chat, f"input[{index}]", item) for index, item in enumerate(items)]


def message_items(message: str, role: Role, parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    """A stored message as items."""
    if role is Role.ASSISTANT:
        return _assistant_items(message, parts)
    if role is Role.TOOL:
        results = [part for part in parts if isinstance(part, ToolResult)]
        return [_tool_result_item(message, index, result) for index, result in enumerate(results)]
    content = [{"type": "input_text", "text": part.text} for part in parts if isinstance(part, Text)]
    header = {"id": item_id("message", message, 0), "type": "message", "role": role.value, "status": "completed"}
    return [{**header, "content": content}]


def _assistant_items(message: str, parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for part in parts:
        index = len(items)
        match part:
            case Thinking(text):
                items.append(reasoning_item(item_id("reasoning", message, index), text))
            case Text(text):
                items.append(message_item(item_id("message", message, index), text))
            case ToolCall(id, name, arguments):
                items.append(function_call_item(item_id("function_call", message, index), id, name, arguments))
    return items


def reasoning_item(
    id: str, text: str, status: str = "completed", as_summary: bool = False, encrypt: bool = False
) -> dict[str, Any]:
    content = [{"type": "summary_text" if as_summary else "reasoning_text", "text": text}] if text else []
    item: dict[str, Any] = {"id": id, "type": "reasoning", "status": status, "summary": content if as_summary else []}
    if not as_summary:
        item["content"] = content
    return {**item, "encrypted_content": encrypt_thinking(text)} if encrypt and text else item


def message_item(
    id: str, text: str, status: str = "completed", logprobs: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    header = {"id": id, "type": "message", "role": "assistant", "status": status}
    return {**header, "content": [text_part(text, logprobs)] if text else []}


def text_part(text: str, logprobs: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs or ())}


def function_call_item(id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    header = {"id": id, "type": "function_call", "status": status}
    return {**header, "call_id": call_id, "name": name, "arguments": arguments}


def _tool_result_item(message: str, index: int, result: ToolResult) -> dict[str, Any]:
    header = {"id": item_id("function_call_output", message, index), "type": "function_call_output"}
    return {**header, "call_id": result.call_id, "output": result.content, "status": "completed"}


async def _resolve_reference(chat: Chat, where: str, item: InputItem) -> InputItem:
    if item.type != "item_reference" and not (item.type is None and item.role is None and item.id is not None):
        return item
    id = item.id or ""
    try:
        stored = await _stored_message(chat, id)
    except NotFound:
        raise BadParameter(f"{where}.id", id[:80], "there is no such item") from None
    for value in message_items(stored.id, stored.role, stored.parts):
        if value["id"] == id:
            return InputItem.model_validate(value)
    raise BadParameter(f"{where}.id", id[:80], "there is no such item")


async def _stored_message(chat: Chat, id: str) -> StoredMessage:
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
        case "function_call_output":
            content = _content(f"{where}.output", _require(where, "output", item.output))
            return _chat_message("tool", tool_call_id=_require(where, "call_id", item.call_id), content=content)
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
        if not item.encrypted_content.startswith(_ENCRYPTED_PREFIX):
            raise ValueError
        return base64.urlsafe_b64decode(item.encrypted_content[len(_ENCRYPTED_PREFIX) :]).decode("utf-8")
    except (ValueError, binascii.Error):
        raise BadParameter(f"{where}.encrypted_content", "...", "was not made here, so it can't be read") from None


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
        case _:
            raise BadParameter(f"{where}.type", part.type[:80], "such a part can't be taken here")


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


def split_system(messages: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """The text of the leading system messages, and the messages after them."""
    first = next((n for n, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    return "\n\n".join(message.text for message in messages[:first]), tuple(messages[first:])
