"""A turn of the socket: a reply for whoever reads it, on whichever socket, as long as somebody may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from palaver.errors import BadParameter
from palaver.store.records import new_id


class TurnRecord:
    """Append-only. A message is made once, so that whoever reads it again reads the very same."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._standing: str | None = None
        self._changed = asyncio.Event()
        self.ended = False
        self.size = 0
        """In characters."""

    def __len__(self) -> int:
        return len(self._messages)

    def tell(self, message: Mapping[str, Any], last: bool = False) -> None:
        """The next message, with its number. A turn has one last message."""
        assert not self.ended
        text = encode_message({**message, "seq": len(self) + 1})
        self._messages.append(text)
        self._standing = None
        self.size += len(text)
        self.ended = last
        self._wake()

    def stand(self, message: Mapping[str, Any]) -> None:
        """How the turn stands until its next message; it has the number of the message before."""
        self._standing = encode_message({**message, "seq": len(self)})
        self._wake()

    async def read(self, after: int = 0) -> AsyncGenerator[str]:
        """Everything after that message, as it comes, to the last."""
        if after > len(self):
            raise BadParameter("after", after, f"the turn has {len(self)} messages so far")
        at, told = after, None
        while True:
            changed = self._changed
            while at < len(self):
                at += 1
                yield self._messages[at - 1]
            if self._standing is not None and self._standing is not told:
                told = self._standing
                yield told
            if self.ended:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def encode_message(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


@dataclass(eq=False)
class SocketTurn:
    owner: str
    lasting: bool = False
    """Whether the reply is a conversation's, which goes on when nobody reads it."""
    id: str = field(default_factory=new_id)
    record: TurnRecord = field(default_factory=TurnRecord)
    readers: int = 0
    halt: Callable[[], None] | None = None
    """Ends its making, while it is made."""

    def stop(self) -> None:
        """Ends it within one step, whatever it does just now; what was said stays. One that is over stays so."""
        if self.halt is not None:
            self.halt()
