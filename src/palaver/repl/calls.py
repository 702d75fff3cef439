"""Tool calls, shown as calls."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from palaver.messages import ToolCall
from palaver.repl.markdown import highlighted
from palaver.repl.safe import safe

_SHORT = 60


class Call:
    """One call of a reply while its arguments are written."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments: list[str] = []

    def feed(self, arguments: str) -> None:
        self._arguments.append(arguments)

    def done(self) -> list[RenderableType]:
        return []

    def live(self, now: float) -> list[RenderableType]:
        return [Text.assemble((f"calls {safe(self._name)} ", "call"), safe("".join(self._arguments))[-400:])]

    def close(self, now: float) -> list[RenderableType]:
        return written(self._name, "".join(self._arguments))


def written(name: str, arguments: str) -> list[RenderableType]:
    """`calls weather(city="Oslo")`, or the arguments below the name where they are long or no object."""
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return [Text.assemble((f"calls {safe(name)} ", "call"), safe(arguments)), _not_json()]
    short = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in _items(values))
    if isinstance(values, dict) and len(short) <= _SHORT:
        return [Text.assemble((f"calls {safe(name)}", "call"), safe(f"({short})"))]
    text = json.dumps(values, ensure_ascii=False, indent=2)
    return [Text(f"calls {safe(name)}", style="call"), highlighted(safe(text), "json")]


def unanswered(calls: Iterable[ToolCall], answered: Iterable[str]) -> list[ToolCall]:
    known = set(answered)
    return [call for call in calls if call.id not in known]


def _items(values: object) -> list[tuple[str, object]]:
    return list(values.items()) if isinstance(values, dict) else []


def _not_json() -> Text:
    return Text("The arguments are no JSON, or were cut off.", style="note")
