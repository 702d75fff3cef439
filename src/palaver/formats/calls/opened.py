"""The tool calls of one reply as they open: numbers, ids, and the pieces of their arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from palaver.events import ReadEvent, ToolCallDelta, ToolCallOpened
from palaver.messages import Tool


class OpenedCalls:
    """Hands out numbers and ids. Ids are a function of the prompt and the number, nine letters and digits."""

    def __init__(self, context_ids: Sequence[int], tools: Sequence[Tool]) -> None:
        self._context = context_ids
        self.tools = tools
        self.count = 0
        self.in_thought = False

    def open(self, name: str, call_id: str = "") -> ReadEvent:
        self.count += 1
        return ToolCallOpened(self.count - 1, call_id or self._id(self.count - 1), name, self.in_thought)

    def arguments(self, text: str) -> list[ReadEvent]:
        return [ToolCallDelta(self.count - 1, text)] if text else []

    def schema(self, name: str, key: str) -> Mapping[str, Any]:
        """What the offered tool says of an argument; nothing where it is not known."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        found = (tool.parameters.get("properties") or {}).get(key) if tool else None
        return found if isinstance(found, Mapping) else {}

    def _id(self, index: int) -> str:
        seed = ",".join(map(str, self._context)) + f"/{index}"
        return hashlib.sha256(seed.encode()).hexdigest()[:9]


class CallReader(Protocol):
    """Reads what is said in the slots of one syntax."""

    def enter(self, slot: str) -> list[ReadEvent]:
        """The reply is in a state with this slot now."""
        ...

    def say(self, slot: str, text: str) -> list[ReadEvent]: ...

    def leave(self) -> list[ReadEvent]:
        """The calls end here."""
        ...

    def cut(self) -> list[ReadEvent]:
        """The reply stops here, in the midst of a call."""
        ...
