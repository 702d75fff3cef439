"""The tool calls of one reply as they open: numbers, ids, and the pieces of their arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from palaver.events import ReadEvent, ToolCallDelta, ToolCallOpened
from palaver.formats.markers import visible
from palaver.messages import Tool


class OpenedCalls:
    """Hands out numbers and ids. Ids are a function of the prompt and the number, nine letters and digits."""

    def __init__(self, context_ids: Sequence[int], tools: Sequence[Tool]) -> None:
        self._context = context_ids
        self.tools = tools
        self.count = 0
        self.in_thought = False
        self._ignored: list[str] = []

    def open(self, name: str, call_id: str = "") -> ReadEvent:
        self.count += 1
        return ToolCallOpened(self.count - 1, call_id or self._id(self.count - 1), name, self.in_thought)

    def arguments(self, text: str) -> list[ReadEvent]:
        return [ToolCallDelta(self.count - 1, text)] if text else []

    def ignore(self, text: str) -> None:
        """Remembers what stands among the calls and is no part of one: nothing that was said is discarded."""
        self._ignored.append(text)

    def take_ignored(self) -> str:
        text, self._ignored = visible("".join(self._ignored)), []
        return text if any(map(str.isalnum, text)) else ""

    def schema(self, name: str, key: str) -> Mapping[str, Any]:
        """What the offered tool says of an argument; nothing where it is not known."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        found = (tool.parameters.get("properties") or {}).get(key) if tool else None
        return found if isinstance(found, Mapping) else {}

    def parameter(self, name: str, place: int) -> str:
        """The name of the tool's parameter at this place."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        names = list(tool.parameters.get("properties") or {}) if tool else []
        return names[place] if place < len(names) else f"argument_{place + 1}"

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
        """The calls end here; what is no part of them has been ignored."""
        ...

    def cut(self) -> list[ReadEvent]:
        """The reply stops here, in the midst of a call; what could not be told has been ignored."""
        ...
