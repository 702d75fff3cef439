"""A reply on the screen: its thoughts, answers and calls in their order, shown while they come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, assert_never

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from palaver.chat.interface import Chat
from palaver.chat.turn_log import LogEntry
from palaver.errors import PalaverError
from palaver.events import (
    AnswerDelta,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    ReadEvent,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
)
from palaver.messages import Message, Thinking, ToolCall
from palaver.messages import Text as TextPart
from palaver.phases import Phase
from palaver.repl.input import KeyActions, LineSource
from palaver.repl.markdown import MarkdownStream, highlight_code
from palaver.repl.prompt import TWICE
from palaver.repl.sanitize import one_line, sanitize
from palaver.repl.screen import Screen
from palaver.repl.settings import ThinkingDisplay

if TYPE_CHECKING:
    from palaver.repl.voice import SpokenReply

_SHORT = 60


class ToolCallView:
    """One call of a reply while its arguments are written."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments: list[str] = []

    def feed(self, arguments: str) -> None:
        self._arguments.append(arguments)

    def done(self) -> list[RenderableType]:
        return []

    def live(self, now: float) -> list[RenderableType]:
        return [Text.assemble((f"calls {sanitize(self._name)} ", "call"), sanitize("".join(self._arguments))[-400:])]

    def close(self, now: float) -> list[RenderableType]:
        return format_call(self._name, "".join(self._arguments))


def format_call(name: str, arguments: str) -> list[RenderableType]:
    """`calls weather(city="Oslo")`, or the arguments below the name where they are long or no object."""
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return [Text.assemble((f"calls {sanitize(name)} ", "call"), sanitize(arguments)), _not_json()]
    short = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in _items(values))
    if isinstance(values, dict) and len(short) <= _SHORT:
        return [Text.assemble((f"calls {sanitize(name)}", "call"), sanitize(f"({short})"))]
    text = json.dumps(values, ensure_ascii=False, indent=2)
    return [Text(f"calls {sanitize(name)}", style="call"), highlight_code(sanitize(text), "json")]


def unanswered_calls(calls: Iterable[ToolCall], answered: Iterable[str]) -> list[ToolCall]:
    known = set(answered)
    return [call for call in calls if call.id not in known]


def _items(values: object) -> list[tuple[str, object]]:
    return list(values.items()) if isinstance(values, dict) else []


def _not_json() -> Text:
    return Text("The arguments are no JSON, or were cut off.", style="note")


SHOWN = 6
"""Lines of a collapsed thought."""
_TAIL = 4000
"""Characters that are enough to fill them, and after which an open line is cut."""


def format_seconds(value: float) -> str:
    """3.2 s, 2 min 5 s"""
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def format_tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


class ThinkingSection:
    """One thought of a reply. `done` and `live` as in every section of a reply."""

    def __init__(self, mode: ThinkingDisplay, now: float | None, before: int = 0) -> None:
        """`now`: None where it is open, but the prompt is still read. `before`: how many tokens of the reply were
        thought before this thought."""
        self.mode = mode
        self._begun = now
        self._before = before
        self._counted = before
        self._text: list[str] = []
        self._open = ""
        """Expanded: the line that still grows. Collapsed: the last lines."""
        self._first = True

    def begin(self, now: float) -> None:
        """From here on its time is taken."""
        self._begun = now

    def count(self, tokens: int) -> None:
        """How many tokens of the reply were thought up to now, this thought's among them."""
        self._counted = max(self._counted, tokens)

    def feed(self, text: str) -> None:
        text = sanitize(text)
        self._text.append(text)
        self._open += text
        if self.mode is not ThinkingDisplay.EXPANDED and len(self._open) > 2 * _TAIL:
            self._open = self._open[-_TAIL:]

    def toggle(self, mode: ThinkingDisplay) -> None:
        """In full from its start on; what was shown in full stays where it is."""
        if mode is ThinkingDisplay.EXPANDED and self.mode is not mode:
            self._open = "".join(self._text)
            self._first = True
        self.mode = mode

    def done(self) -> list[RenderableType]:
        if self.mode is not ThinkingDisplay.EXPANDED:
            return []
        place = self._open.rfind("\n")
        if place < 0 and len(self._open) > _TAIL:
            place = self._open.rfind(" ")
        if place < 0:
            return []
        text, self._open = self._open[:place], self._open[place + 1 :]
        return self._lines(text)

    def live(self, now: float) -> list[RenderableType]:
        head = Text(f"thinking · {self._told(now)}" if self._begun is not None else "thinking", style="thought")
        match self.mode:
            case ThinkingDisplay.COLLAPSED:
                return [head, BarredText(self._open.strip("\n"), SHOWN)]
            case ThinkingDisplay.HIDDEN:
                return [head]
            case ThinkingDisplay.EXPANDED:
                return [BarredText(self._open), head]

    def close(self, now: float) -> list[RenderableType]:
        shown = [*self.done(), *(self._lines(self._open) if self._open.strip() else ())]
        if self.mode is ThinkingDisplay.HIDDEN:
            return []
        told = Text(f"thought for {self._told(now)}", style="thought")
        return [*(shown if self.mode is ThinkingDisplay.EXPANDED else ()), told]

    def _told(self, now: float) -> str:
        count = self._counted - self._before
        return format_seconds(now - (now if self._begun is None else self._begun)) + (
            f" · {format_tokens(count)}" if count else ""
        )

    def _lines(self, text: str) -> list[RenderableType]:
        text = text.lstrip("\n") if self._first else text
        self._first = self._first and not text
        return [BarredText(text)] if text else []


class BarredText:
    """Dim text with a bar at its left, so that it can be told from an answer without colours too."""

    def __init__(self, text: str, last: int = 0) -> None:
        self._text = text
        self._last = last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(self._text if not self._last else self._text[-_TAIL:], style="thought", overflow="fold")
        if not text.plain:
            return
        lines = console.render_lines(text, options.update(width=max(1, options.max_width - 2)), pad=False)
        for line in lines[-self._last :] if self._last else lines:
            yield Segment("│ ", console.get_style("thought"))
            yield from line
            yield Segment.line()


def render_thinking(thoughts: Iterable[str]) -> list[RenderableType]:
    """Thoughts of a past reply, in full."""
    return [BarredText(sanitize(thought).strip("\n")) for thought in thoughts if thought.strip()]


_PATIENCE = 0.3
"""Seconds after which it is told what is being waited for."""


class TurnView(Protocol):
    """Shows one turn; whoever follows the turn's events tells it everything, and when to paint."""

    def take(self, entry: LogEntry) -> None: ...

    def paint(self) -> None: ...

    def toggle(self) -> None: ...

    def leave(self) -> None:
        """No more comes, ended or not."""
        ...

    @property
    def ending(self) -> Finished | Failed | None: ...

    @property
    def first(self) -> float | None:
        """After how many seconds something came."""
        ...


class ReplySection(Protocol):
    """A part of a reply of one kind. What is done is given once, what is live as often as it is asked for."""

    def feed(self, text: str) -> None: ...

    def done(self) -> list[RenderableType]: ...

    def live(self, now: float) -> list[RenderableType]: ...

    def close(self, now: float) -> list[RenderableType]: ...


class AnswerSection:
    def __init__(self) -> None:
        self._stream = MarkdownStream()

    def feed(self, text: str) -> None:
        self._stream.feed(text)

    def done(self) -> list[RenderableType]:
        return self._stream.done()

    def live(self, now: float) -> list[RenderableType]:
        return self._stream.live()

    def close(self, now: float) -> list[RenderableType]:
        return self._stream.close()


class ReplyView:
    """`known`: the number up to which the events were shown before; they are read for what is open, and not shown."""

    def __init__(
        self,
        screen: Screen,
        thoughts: ThinkingDisplay,
        *,
        known: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._screen = screen
        self.thoughts = thoughts
        self._known = known
        self._clock = clock
        self._asked = clock()
        self.first: float | None = None
        self._section: ReplySection | None = None
        self._thought = 0
        self._done: list[RenderableType] = []
        self._begun = False
        """Whether something of the reply is on the screen."""
        self._standing = ""
        self._started = False
        self._muted = False
        self.ending: Finished | Failed | None = None

    def take(self, entry: LogEntry) -> None:
        self._muted = self._is_known(entry)
        self._take(entry.event)
        if self._muted and self._section is not None:
            self._section.done()

    def paint(self) -> None:
        if self.ending is not None or self._muted:
            return
        if self._section is not None:
            self._add(self._section.done())
        done, self._done = self._done, []
        self._screen.update(done, self._live())

    def toggle(self) -> None:
        """Thoughts in full, or collapsed again."""
        self.thoughts = (
            ThinkingDisplay.COLLAPSED if self.thoughts is ThinkingDisplay.EXPANDED else ThinkingDisplay.EXPANDED
        )
        if isinstance(self._section, ThinkingSection):
            self._section.toggle(self.thoughts)
        self.paint()

    def leave(self) -> None:
        if self.ending is None:
            self._close()
            done, self._done = self._done, []
            self._screen.update(done)

    def _is_known(self, entry: LogEntry) -> bool:
        told = isinstance(entry.event, Finished | Failed | Waiting)
        told |= isinstance(entry.event, Started) and bool(entry.event.notice)
        return self._known > 0 and entry.number <= self._known and not told

    def _take(self, event: Event) -> None:
        match event:
            case Waiting(position, wait):
                about = f", about {format_seconds(wait)}" if wait else ""
                self._standing = f"waiting: place {position} in the queue{about}"
            case Started(notice=notice):
                self._standing, self._started = "", True
                if notice:
                    self._add([Text(one_line(notice), style="note")])
                if isinstance(self._section, ThinkingSection):  # opened by the prompt itself
                    self._section.begin(self._clock())
            case Snapshot(message):
                self._replay(message)
            case Finished() | Failed():
                self._end(event)
            case _:
                if not self._muted and not isinstance(event, PhaseOpened):  # the prompt may open a phase, too
                    self._come()
                self._read(event)

    def _come(self) -> None:
        if not self._started and isinstance(self._section, ThinkingSection):
            self._section.begin(self._clock())
        self._started = True
        if self.first is None:
            self.first = self._clock() - self._asked

    def _read(self, event: ReadEvent) -> None:
        match event:
            case PhaseOpened(phase, tokens):
                self._count(tokens)
                if phase is Phase.THINKING:
                    self._open(ThinkingSection)
                elif isinstance(self._section, ThinkingSection):
                    self._close()
            case ThinkingDelta(text, tokens):
                self._open(ThinkingSection).feed(text)
                self._count(tokens)
            case AnswerDelta(text):
                self._open(AnswerSection).feed(text)
            case ToolCallOpened(_, _, name):
                self._close()
                self._section = ToolCallView(name)
            case ToolCallDelta(_, arguments):
                self._open(ToolCallView).feed(arguments)
            case Notice(text):
                self._add([Text(text, style="note")])
            case _:
                assert_never(event)

    def _count(self, tokens: int) -> None:
        """How many tokens were thought so far; the open thought's are those since it was opened."""
        self._thought = max(self._thought, tokens)
        if isinstance(self._section, ThinkingSection):
            self._section.count(tokens)

    def _replay(self, message: Message) -> None:
        for part in message.parts:
            match part:
                case Thinking(text):
                    self._read(ThinkingDelta(text))
                case TextPart(text):
                    self._read(AnswerDelta(text))
                case ToolCall(id, name, arguments):
                    self._read(ToolCallOpened(0, id, name))
                    self._read(ToolCallDelta(0, arguments))
                case _:
                    pass

    def _open(self, kind: type[ReplySection]) -> ReplySection:
        """The section that is open, or a new one where that is of another kind."""
        if self._section is None or not isinstance(self._section, kind):
            self._close()
            self._section = self._new_thought() if kind is ThinkingSection else kind()
        return self._section

    def _new_thought(self) -> ThinkingSection:
        """Its time is taken from when the model can think; the prompt may open it before it was read."""
        return ThinkingSection(self.thoughts, self._clock() if self._started else None, self._thought)

    def _close(self) -> None:
        if self._section is not None:
            self._add(self._section.close(self._clock()))
            gap = not self._muted and isinstance(self._section, ThinkingSection) and self._begun
            self._section = None
            if gap:
                self._done.append(Text())

    def _add(self, shown: list[RenderableType]) -> None:
        if shown and not self._muted:
            self._done += shown
            self._begun = True

    def _end(self, ending: Finished | Failed) -> None:
        for event in ending.tail:
            self._read(event)
        self._close()
        done, self._done = self._done, []
        self._screen.update(done)
        self.ending = ending

    def _live(self) -> list[RenderableType]:
        now = self._clock()
        shown = self._section.live(now) if self._section is not None else []
        if self._started or now - self._asked < _PATIENCE:
            return shown
        return [*shown, Text(f"{self._standing or 'reading'} · {format_seconds(now - self._asked)}", style="note")]


PAINTS = 15.0
"""How often a second the live lines are painted."""


class TurnFollower:
    def __init__(self, chat: Chat, view: TurnView, lines: LineSource, reading: SpokenReply | None = None) -> None:
        self._chat = chat
        self.view = view
        self._lines = lines
        self._reading = reading
        self._reply_id = ""
        self._stopping: asyncio.Task[None] | None = None
        self.stopped_at = float("-inf")
        """When Ctrl+C was pressed last."""
        self.dropped = False

    async def follow(self, reply_id: str) -> Finished | Failed | None:
        """Shows the turn; how it ended, or None where that can't be known because the events broke off."""
        self._reply_id = reply_id
        with self._lines.watching(KeyActions(self._interrupted, self.view.toggle)):
            painting = asyncio.create_task(self._paint())
            try:
                async with self._chat.events(reply_id) as entries:
                    async for entry in entries:
                        self.view.take(entry)
                        if self._reading is not None:
                            self._reading.take(entry)
            finally:
                if painting.done():
                    painting.result()
                painting.cancel()
                self.view.leave()
                if self._reading is not None:
                    self._reading.leave()
            if self._stopping is not None:
                with suppress(PalaverError):
                    await self._stopping
        return self.view.ending

    async def _paint(self) -> None:
        while True:
            await asyncio.sleep(1 / PAINTS)
            self.view.paint()

    def _interrupted(self) -> None:
        now = time.monotonic()
        self.dropped = now - self.stopped_at < TWICE
        self.stopped_at = now
        if self._reading is not None:
            self._reading.stop()
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._chat.stop(self._reply_id))
