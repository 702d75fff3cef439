"""Decodes server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MEDIA_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    data: str
    event: str = ""
    id: str | None = None


class SseDecoder:
    """Decodes the bytes of a stream into events. An event that was cut off is never returned.

    Lines end at line feeds alone: JSON text may contain other characters that `str.splitlines` splits at.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._event = ""
        self._id: str | None = None
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            if event := self._parse_line(line.removesuffix(b"\r").decode()):
                yield event

    def _parse_line(self, line: str) -> ServerSentEvent | None:
        """The event that an empty line ends, else None."""
        if not line:
            return self._flush()
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

    def _flush(self) -> ServerSentEvent | None:
        event = ServerSentEvent("\n".join(self._data), self._event, self._id) if self._data else None
        self._event, self._data = "", []
        return event
