"""A turn and the log of its messages, which any socket of the owner can replay and follow."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from palaver.chat.turn_log import Log
from palaver.errors import BadParameter
from palaver.store.records import new_id


class MessageLog(Log[str]):
    """The encoded messages. Every reader gets the same bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        """The total length in characters."""

    def add(self, message: Mapping[str, Any], last: bool = False) -> None:
        """Adds a message with the next sequence number. `last` ends the log."""
        text = encode_message({**message, "seq": len(self) + 1})
        self.size += len(text)
        self.set_status(None)
        self.append(text, last)

    def add_status(self, message: Mapping[str, Any]) -> None:
        """A status that readers get until the next message. It repeats the last sequence number."""
        self.set_status(encode_message({**message, "seq": len(self)}))

    def read(self, after: int = 0) -> AsyncGenerator[str]:
        """The messages after a sequence number, to the end of the log."""
        if after > len(self):
            raise BadParameter("after", after, f"the turn has {len(self)} messages so far")
        return self.follow(after)


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
