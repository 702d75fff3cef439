"""A turn and the log of its messages, which any socket of the owner can replay and follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from palaver.errors import BadParameter
from palaver.store.records import new_id


class MessageLog:
    """Append-only log of encoded messages. Every reader gets the same bytes."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._status: str | None = None
        self._changed = asyncio.Event()
        self.ended = False
        self.size = 0
        """The total length in characters."""

    def __len__(self) -> int:
        return len(self._messages)

    def append(self, message: Mapping[str, Any], last: bool = False) -> None:
        """Appends a message with the next sequence number. `last` ends the log."""
        assert not self.ended
        text = encode_message({**message, "seq": len(self) + 1})
        self._messages.append(text)
        self._status = None
        self.size += len(text)
        self.ended = last
        self._notify()

    def set_status(self, message: Mapping[str, Any]) -> None:
        """A status that readers get until the next message. It repeats the last sequence number."""
        self._status = encode_message({**message, "seq": len(self)})
        self._notify()

    async def read(self, after: int = 0) -> AsyncGenerator[str]:
        """Yields the messages after a sequence number, and follows the log to its end."""
        if after > len(self):
            raise BadParameter("after", after, f"the turn has {len(self)} messages so far")
        position, sent_status = after, None
        while True:
            changed = self._changed
            while position < len(self):
                position += 1
                yield self._messages[position - 1]
            if self._status is not None and self._status is not sent_status:
                sent_status = self._status
                yield sent_status
            if self.ended:
                return
            await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def encode_message(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


@dataclass(eq=False)
class SocketTurn:
    """One reply and its message log. It may outlive the socket that requested it."""

    owner: str
    stored: bool = False
    """Whether the reply belongs to a conversation: then it continues without readers."""
    id: str = field(default_factory=new_id)
    log: MessageLog = field(default_factory=MessageLog)
    readers: int = 0
    on_stop: Callable[[], None] | None = None
    """Stops the generation; None when it has ended."""

    def stop(self) -> None:
        """Stops the generation within one step and keeps the text so far. Has no effect after the end."""
        if self.on_stop is not None:
            self.on_stop()
