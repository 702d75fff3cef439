"""Server-sent events: lines of text that carry JSON, an id to come back with, and comments that keep a line alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MEDIA_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Sent:
    data: str
    event: str = ""
    id: str | None = None


def encoded(data: str, *, event: str = "", id: int | None = None) -> bytes:
    """`data` is JSON, which has no line break."""
    head = f"id: {id}\n" if id is not None else ""
    kind = f"event: {event}\n" if event else ""
    return f"{head}{kind}data: {data}\n\n".encode()


class Decoder:
    """Takes the bytes of a stream, gives what was sent. What a cut left unfinished is never given.

    Lines end at line feeds alone: texts hold other characters that some call the end of a line.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._id: str | None = None
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Sent]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if sent := self._take(line.removesuffix(b"\r").decode()):
                yield sent

    def _take(self, line: str) -> Sent | None:
        if not line:
            return self._sent()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id":
                self._id = value
        return None

    def _sent(self) -> Sent | None:
        sent = Sent("\n".join(self._data), self._event, self._id) if self._data else None
        self._event, self._data = "", []
        return sent
