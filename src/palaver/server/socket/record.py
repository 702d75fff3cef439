"""The messages of one turn, numbered as they are made, and its readers, who come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from palaver.errors import BadParameter


class Record:
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
        text = encoded({**message, "seq": len(self) + 1})
        self._messages.append(text)
        self._standing = None
        self.size += len(text)
        self.ended = last
        self._wake()

    def stand(self, message: Mapping[str, Any]) -> None:
        """How the turn stands until its next message; it has the number of the message before."""
        self._standing = encoded({**message, "seq": len(self)})
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


def encoded(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
