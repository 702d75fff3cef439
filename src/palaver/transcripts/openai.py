"""Messages in OpenAI's format: role, content, reasoning_content, tool_calls."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from palaver.messages import (
    Audio,
    Image,
    MediaPart,
    Message,
    Part,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Video,
    describe_media,
)

_ROLES = {role.value: role for role in Role} | {
    "developer": Role.SYSTEM,
    "function": Role.TOOL,
    "model": Role.ASSISTANT,
}
_URL_KINDS: Mapping[str, Literal["image", "audio", "video"]] = {
    "image_url": "image",
    "audio_url": "audio",
    "video_url": "video",
}
_DATA = re.compile(r"data:([\w.+/-]*)(?:;[^,;]*)*?;base64,(.*)", re.DOTALL)


def to_openai(message: Message) -> list[dict[str, Any]]:
    """One message, or one per result for tool results. Content is always a list of parts, so that its type is the same
    in every line of a file."""
    if message.role is Role.TOOL:
        media = "".join(f"\n{describe_media(part)}" for part in message.parts if isinstance(part, MediaPart))
        results = [_result(result, "") for result in message.tool_results[:-1]]
        return results + [_result(result, media) for result in message.tool_results[-1:]]
    value: dict[str, Any] = {"role": message.role.value, "content": _content(message.parts)}
    if message.thinking:
        value["reasoning_content"] = message.thinking
    if message.tool_calls:
        value["tool_calls"] = [_call(call) for call in message.tool_calls]
    return [value]


ReadUrl = Callable[[str, Literal["image", "audio", "video", "file"], str], Part]
"""Reads a file from its URL, by what the client calls it, and its name."""


def from_openai(value: Mapping[str, Any], read_url: ReadUrl | None = None) -> Message:
    """Raises ValueError if the value is no message. By default, the media types of data URLs are believed."""
    role = _ROLES.get(str(value.get("role")))
    if role is None:
        raise ValueError(f"unknown role {value.get('role')!r}")
    content = tuple(_parts(value.get("content"), read_url or (lambda url, kind, name: from_data_url(url))))
    if role is Role.TOOL:
        if any(isinstance(part, MediaPart) for part in content):
            raise ValueError("a tool result holds text, not pictures, sound or video")
        text = "".join(part.text for part in content if isinstance(part, Text))
        return Message(role, (ToolResult(str(value.get("tool_call_id") or ""), text, str(value.get("name") or "")),))
    thinking = value.get("reasoning_content") or value.get("reasoning") or value.get("thinking")
    thought = (Thinking(thinking),) if isinstance(thinking, str) and thinking else ()
    return Message(role, (*thought, *content, *map(_from_call, value.get("tool_calls") or ())))


def merge_tool_results(messages: Iterable[Message]) -> list[Message]:
    """Joins consecutive tool results into one message."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role is Role.TOOL and merged[-1].role is Role.TOOL:
            merged[-1] = Message(Role.TOOL, (*merged[-1].parts, *message.parts))
        else:
            merged.append(message)
    return merged


def data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def from_data_url(url: str) -> Image | Audio | Video:
    """Raises ValueError for any URL but a data URL with a picture, sound or a video in base64."""
    if not url.startswith("data:"):
        raise ValueError(f"files at other addresses are not downloaded: {url[:80]!r}")
    parsed = _DATA.fullmatch(url)
    if parsed is None:
        raise ValueError(f"a data URL that is not in base64: {url[:80]!r}")
    media_type, data = parsed[1], base64.b64decode(parsed[2])
    match media_type.split("/")[0]:
        case "image":
            return Image(media_type, data)
        case "audio":
            return Audio(media_type, data)
        case "video":
            return Video(media_type, data)
        case "":
            raise ValueError("a file without a media type: a data URL that names it is needed")
        case _:
            raise ValueError(f"a file of the type {media_type!r} is neither a picture nor sound nor a video")


def _content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [_to_part(part) for part in parts if isinstance(part, Text | Image | Audio | Video)]


def _to_part(part: Text | Image | Audio | Video) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image(media_type, data):
            return {"type": "image_url", "image_url": {"url": data_url(media_type, data)}}
        case Video(media_type, data):
            return {"type": "video_url", "video_url": {"url": data_url(media_type, data)}}
        case Audio(media_type, data):
            return {"type": "audio_url", "audio_url": {"url": data_url(media_type, data)}}


def _parts(content: Any, read_url: ReadUrl) -> Iterable[Part]:
    if isinstance(content, str):
        return (Text(content),) if content else ()
    if content is None:
        return ()
    if not isinstance(content, list):
        raise ValueError(f"the content is neither text nor parts: {type(content).__name__}")
    return [_from_part(part, read_url) for part in content]


def _from_part(part: Any, read_url: ReadUrl) -> Part:
    match part:
        case str():
            return Text(part)
        case {"type": "text" | "input_text" | "output_text", "text": str(text)} | {"text": str(text)}:
            return Text(text)
        case {"type": "refusal", "refusal": str(text)}:
            return Text(text)
        case {"type": "thinking" | "reasoning", "thinking": str(text)}:
            return Thinking(text)
        case {"type": "image_url" | "audio_url" | "video_url" as kind}:
            return read_url(_url(part.get(kind), kind), _URL_KINDS[kind], "")
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(format)}}:
            return read_url(f"data:audio/{format};base64,{data}", "audio", "")
        case {"type": "file", "file": {"file_data": str(data), **about}}:
            is_url = ":" in data[:16]  # base64 has no colon
            url = data if is_url else f"data:;base64,{data}"
            return read_url(url, "file", str(about.get("filename") or ""))
        case {"type": "file", "file": {"file_id": str()}}:
            raise ValueError("files are not stored under an id here: send file_data")
        case _:
            raise ValueError(f"unknown part of the content: {str(part)[:80]}")


def _url(value: Any, kind: str) -> str:
    match value:
        case str(url) | {"url": str(url)}:
            return url
        case _:
            raise ValueError(f"a part of the type {kind!r} has no URL")


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _from_call(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise ValueError(f"a tool call has no name: {str(call)[:80]}")
    arguments = function.get("arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(call.get("id") or ""), str(function["name"]), written)


def _result(result: ToolResult, media: str) -> dict[str, Any]:
    """`media`: lines that stand for the media of the result, since OpenAI's tool messages hold text alone."""
    value: dict[str, Any] = {
        "role": "tool",
        "tool_call_id": result.call_id,
        "content": [_to_part(Text(result.content + media))],
    }
    return {**value, "name": result.name} if result.name else value
