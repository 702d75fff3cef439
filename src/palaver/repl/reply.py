"""A reply on the screen: its thoughts, answers and calls in their order, shown while they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, assert_never

from rich.console import RenderableType
from rich.text import Text

from palaver.chat.turn_log import LogEntry
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
from palaver.repl.calls import Call
from palaver.repl.markdown import MarkdownStream
from palaver.repl.safe import one_line
from palaver.repl.screen import Screen
from palaver.repl.settings import Thoughts
from palaver.repl.thinking import Thought, seconds

_PATIENCE = 0.3
"""Seconds after which it is told what is being waited for."""


class View(Protocol):
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


class Section(Protocol):
    """A part of a reply of one kind. What is done is given once, what is live as often as it is asked for."""

    def feed(self, text: str) -> None: ...

    def done(self) -> list[RenderableType]: ...

    def live(self, now: float) -> list[RenderableType]: ...

    def close(self, now: float) -> list[RenderableType]: ...


class Answer:
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
        thoughts: Thoughts,
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
        self._section: Section | None = None
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
        self.thoughts = Thoughts.COLLAPSED if self.thoughts is Thoughts.EXPANDED else Thoughts.EXPANDED
        if isinstance(self._section, Thought):
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
                about = f", about {seconds(wait)}" if wait else ""
                self._standing = f"waiting: place {position} in the queue{about}"
            case Started(notice=notice):
                self._standing, self._started = "", True
                if notice:
                    self._add([Text(one_line(notice), style="note")])
                if isinstance(self._section, Thought):  # opened by the prompt itself
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
        if not self._started and isinstance(self._section, Thought):
            self._section.begin(self._clock())
        self._started = True
        if self.first is None:
            self.first = self._clock() - self._asked

    def _read(self, event: ReadEvent) -> None:
        match event:
            case PhaseOpened(phase, tokens):
                self._count(tokens)
                if phase is Phase.THINKING:
                    self._open(Thought)
                elif isinstance(self._section, Thought):
                    self._close()
            case ThinkingDelta(text, tokens):
                self._open(Thought).feed(text)
                self._count(tokens)
            case AnswerDelta(text):
                self._open(Answer).feed(text)
            case ToolCallOpened(_, _, name):
                self._close()
                self._section = Call(name)
            case ToolCallDelta(_, arguments):
                self._open(Call).feed(arguments)
            case Notice(text):
                self._add([Text(text, style="note")])
            case _:
                assert_never(event)

    def _count(self, tokens: int) -> None:
        """How many tokens were thought so far; the open thought's are those since it was opened."""
        self._thought = max(self._thought, tokens)
        if isinstance(self._section, Thought):
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

    def _open(self, kind: type[Section]) -> Section:
        """The section that is open, or a new one where that is of another kind."""
        if self._section is None or not isinstance(self._section, kind):
            self._close()
            self._section = self._new_thought() if kind is Thought else kind()
        return self._section

    def _new_thought(self) -> Thought:
        """Its time is taken from when the model can think; the prompt may open it before it was read."""
        return Thought(self.thoughts, self._clock() if self._started else None, self._thought)

    def _close(self) -> None:
        if self._section is not None:
            self._add(self._section.close(self._clock()))
            gap = not self._muted and isinstance(self._section, Thought) and self._begun
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
        return [*shown, Text(f"{self._standing or 'reading'} · {seconds(now - self._asked)}", style="note")]
