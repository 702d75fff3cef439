"""Files that clients attach to messages: media become parts, checked and described; documents become text."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, TypeVar
from urllib.parse import unquote_to_bytes

from palaver.errors import UnsupportedContent
from palaver.media import BadMedia, MediaDecoder, MediaInfo
from palaver.media.headers import DOCUMENT_TYPES, sniff
from palaver.messages import Audio, Image, MediaPart, Message, Part, Role, Text, ToolResult, Video, describe_media

FileKind = Literal["image", "audio", "video", "file"]
"""What a client says that it attaches; `file` is anything."""
_PARTS: dict[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}
P = TypeVar("P")
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_NEEDED = {
    "image": ("pictures", "a vision model"),
    "audio": ("sound", "an audio model"),
    "video": ("videos", "a video model"),
}
PICTURE_FOLLOWS = "The picture follows."
"""Said in a tool result whose pictures follow as a message of the user."""
NOT_SEEN = "{media} The user sees it; you can't."
_EXPECTED = {"image": "a picture", "audio": "sound", "video": "a video"}


@dataclass(frozen=True, slots=True)
class AttachmentReader:
    """Reads what clients send. Blocking: call it in a thread. Raises BadMedia, or UnsupportedContent for media that
    the model does not accept, before anything is decoded."""

    decoder: MediaDecoder
    model: str = ""
    accepts: Collection[str] | None = None
    """The media that the model accepts; None for any, where no model is asked."""
    fetch: Callable[[str], bytes] | None = None
    """Downloads a file from another address, if the operator allows it."""
    why: str = ""
    """Why the model does not accept media that it was made for."""

    def read_url(self, url: str, kind: FileKind, name: str = "") -> Part:
        """Reads a data URL, or downloads a file."""
        if url[:5].lower() == "data:":
            return self.read(_decode_data_url(url, name), kind, name)
        if self.fetch is None:
            raise BadMedia(name, "is at another address, which this server does not download: send it as a data URL")
        return self.read(self.fetch(url), kind, name or PurePath(url.partition("?")[0]).name)

    def read(self, data: bytes, kind: FileKind = "file", name: str = "") -> Part:
        """The file as a part: media, or the text of a document."""
        media_type = sniff(data)
        if kind == "file" and (media_type in DOCUMENT_TYPES or _as_text(data) is not None):
            return Text(self.read_document(data, name))
        if self.accepts is not None and media_type is not None:
            check_accepted(media_type.partition("/")[0], self.model, self.accepts, self.why)
        info = self.decoder.inspect(data, name)
        if kind not in ("file", info.kind) or info.kind == "document":
            raise BadMedia(name, f"is not {_EXPECTED[kind]}")
        if self.accepts is not None:
            check_accepted(info.kind, self.model, self.accepts, self.why)
        return _media_part(info, data, name)

    def read_document(self, data: bytes, name: str = "") -> str:
        """The text of a PDF, DOCX, HTML or text file, as it stands in a message."""
        if not data.strip():
            raise BadMedia(name, "is empty")
        text = self.decoder.document_text(data, name) if sniff(data) in DOCUMENT_TYPES else _as_text(data)
        if text is None:
            raise BadMedia(name, "is neither text in UTF-8 nor a PDF, DOCX or HTML file")
        return format_document(name, text)


@contextmanager
def named_in_errors(where: str) -> Iterator[None]:
    """Inside, a BadMedia without the name of a file names this place of the request."""
    try:
        yield
    except BadMedia as error:
        raise (error if error.name else BadMedia(where, error.why)) from None


def check_accepted(kind: str, model: str, accepts: Collection[str], why: str = "") -> None:
    """Raises UnsupportedContent for media that the model does not accept. `why`: if it could."""
    if kind in _NEEDED and kind not in accepts:
        what, needed = _NEEDED[kind]
        reason = why if why and kind != "audio" else f"{needed} is needed for that"
        raise UnsupportedContent(f"The model {model!r} does not accept {what}: {reason}.")


def check_messages(messages: Sequence[Message], model: str, accepts: Collection[str], why: str = "") -> None:
    """Raises UnsupportedContent if a message has media that the model does not accept."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, MediaPart):
                check_accepted(part.type, model, accepts, why)


def has_result_media(messages: Sequence[Message]) -> bool:
    """Whether a tool result has pictures, sound or video."""
    return any(isinstance(part, MediaPart) for one in messages if one.role is Role.TOOL for part in one.parts)


def describe_result_media(messages: Sequence[Message], accepts: Collection[str]) -> tuple[Message, ...]:
    """The messages, where each tool result has a line of text for the media that the model does not accept there."""
    return tuple(_describe_result(message, accepts) if message.role is Role.TOOL else message for message in messages)


def _describe_result(message: Message, accepts: Collection[str]) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        if not isinstance(part, MediaPart) or part.type in accepts:
            parts.append(part)
            continue
        line = NOT_SEEN.format(media=describe_media(part))
        last = next((index for index in reversed(range(len(parts))) if isinstance(parts[index], ToolResult)), None)
        if last is None:
            parts.append(Text(line))
            continue
        result = parts[last]
        assert isinstance(result, ToolResult)
        parts[last] = replace(result, content=f"{result.content}\n{line}" if result.content else line)
    return Message(message.role, tuple(parts))


def describe_parts(
    parts: Iterable[P], inspect: Callable[[bytes, str], MediaInfo]
) -> tuple[P | Image | Audio | Video, ...]:
    """The parts with the type, the size and the length of media as their bytes show them. Raises BadMedia."""
    return tuple(
        _media_part(inspect(part.data, part.name), part.data, part.name)
        if isinstance(part, Image | Audio | Video)
        else part
        for part in parts
    )


def format_document(name: str, text: str) -> str:
    """The text of an attached document as it stands in a message: under its name, apart from other text."""
    title = " ".join(name.replace(":", " ").split())[:200] or "document"
    return f"\n\nFile {title}:\n\n{text.rstrip()}\n\n"


def _media_part(info: MediaInfo, data: bytes, name: str) -> Image | Audio | Video:
    if info.kind == "document":
        raise BadMedia(name, "is a document, not media")
    return _PARTS[info.kind](info.media_type, data, name, info.width, info.height, round(info.seconds, 3))


def _as_text(data: bytes) -> str | None:
    """The text of a file in UTF-8; None for other files."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or not text.strip() else text


def _decode_data_url(url: str, name: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise BadMedia(name, "has a data URL without data")
    body = url[head.end() :]
    if not head[2].lower().endswith(";base64"):
        return unquote_to_bytes(body)
    return decode_base64(body, name)


def decode_base64(text: str, name: str = "") -> bytes:
    try:
        return base64.b64decode(text.encode("ascii").translate(None, b"\r\n\t "), validate=True)
    except (binascii.Error, ValueError):
        raise BadMedia(name, "is not valid base64") from None
