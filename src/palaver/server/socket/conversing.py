"""The history as a client of the socket sends it, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaver.errors import BadParameter, NoMessages, UnsupportedContent
from palaver.messages import Message, Part, Role, Text, Thinking
from palaver.server.socket.fields import Opening, Said
from palaver.server.socket.reading import unknown_field

_MEDIA = {"image": "an image", "audio": "sound", "video": "a video"}
_ABOUT_MEDIA = ("type", "data", "name", "duration", "stack_frames")


def messages_of(opening: Opening, most: int) -> tuple[Message, ...]:
    """The conversation up to the reply that is asked for."""
    if len(opening.messages) > most:
        raise BadParameter("messages", f"{len(opening.messages)} messages", f"at most {most} are taken")
    found = tuple(_message(f"messages[{place}]", said) for place, said in enumerate(opening.messages))
    last = found[-1]
    if last.role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    if last.role is not Role.USER:
        raise NoMessages
    return found


def _message(where: str, said: Said) -> Message:
    role = Role(said.role)
    if said.thinking and role is not Role.ASSISTANT:
        raise BadParameter(f"{where}.thinking", "...", "only the assistant's messages have thinking")
    thought: tuple[Part, ...] = (Thinking(said.thinking),) if said.thinking else ()
    return Message(role, (*thought, *_parts(f"{where}.content", said.content)))


def _parts(where: str, content: Any) -> tuple[Text, ...]:
    match content:
        case str():
            return (Text(content),)
        case list():
            return tuple(_part(f"{where}[{place}]", part) for place, part in enumerate(content))
        case _:
            raise BadParameter(where, type(content).__name__, "must be a text or a list of parts")


def _part(where: str, part: Any) -> Text:
    if not isinstance(part, Mapping):
        raise BadParameter(where, type(part).__name__, "a part is an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        _only(where, part, _ABOUT_MEDIA)
        raise UnsupportedContent(f"{where}: this model reads text alone and can't be given {_MEDIA[kind]}.")
    if kind != "text":
        raise BadParameter(f"{where}.type", kind, "must be text, image, audio or video")
    _only(where, part, ("type", "text"))
    if not isinstance(part.get("text"), str):
        raise BadParameter(f"{where}.text", part.get("text"), "must be a text")
    return Text(part["text"])


def _only(where: str, part: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name, value in part.items():
        if name not in names and value is not None:
            raise unknown_field(f"{where}.{name[:80]}", value)
