"""A streaming reply on the screen: thinking, answer and tool calls, each a section that renders itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, assert_never

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.turn_log import LogEntry
from palaver.events import (
    AnswerDelta,
    DraftBlock,
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
from palaver.generation import Finish
from palaver.messages import Message, Thinking, ToolCall
from palaver.messages import Text as TextPart
from palaver.phases import Phase
from palaver.repl import strings
from palaver.repl.markdown import MarkdownStream, highlight_code
from palaver.repl.screen import Screen
from palaver.repl.settings import ThinkingDisplay
from palaver.repl.status import loading_line
from palaver.repl.text import format_seconds, format_tokens, one_line, sanitize

if TYPE_CHECKING:
    pass

PAINTS_PER_SECOND = 15.0
"""Frame rate of the live lines."""
COLLAPSED_LINES = 6
"""Lines of collapsed thinking that are shown."""
_TAIL_CHARACTERS = 4000
"""Characters that suffice to fill the collapsed lines. Longer open lines are split."""
_MAX_INLINE_ARGUMENTS = 60
_STATUS_DELAY_SECONDS = 0.3
"""Delay before the status line is shown."""


class ReplySection(Protocol):
    """A part of a reply. `done` returns finished lines once; `live` returns the unfinished ones at every call."""

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


class ThinkingSection:
    """One block of thinking. Implements ReplySection."""

    def __init__(
        self,
        mode: ThinkingDisplay,
        now: float | None,
        tokens_before: int = 0,
        seconds_before: float | None = 0.0,
    ) -> None:
        """`now` is None if the prompt is still being prefilled. `tokens_before` counts the thinking tokens of the reply
        before this block; `seconds_before` is the time this block took before `now`, None if not known."""
        self.mode = mode
        self._started_at = now
        self._seconds_before = seconds_before
        self._tokens_before = tokens_before
        self._token_count = tokens_before
        self._text: list[str] = []
        self._pending = ""
        """Expanded: the unfinished line. Collapsed: the last lines."""
        self._at_start = True

    def start_timer(self, now: float, seconds_before: float | None) -> None:
        """Starts the measured thinking time. Does nothing in a later block whose time is being measured already: the
        server only counts all blocks together."""
        if not self._tokens_before:
            self._seconds_before = seconds_before
        elif self._started_at is not None:
            return
        self._started_at = now

    def set_token_count(self, tokens: int) -> None:
        """Sets the thinking tokens of the reply so far, including this block."""
        self._token_count = max(self._token_count, tokens)

    def feed(self, text: str) -> None:
        text = sanitize(text)
        self._text.append(text)
        self._pending += text
        if self.mode is not ThinkingDisplay.EXPANDED and len(self._pending) > 2 * _TAIL_CHARACTERS:
            self._pending = self._pending[-_TAIL_CHARACTERS:]

    def toggle(self, mode: ThinkingDisplay) -> None:
        """Switches the display. Expanding shows the block from its start; printed lines stay."""
        if mode is ThinkingDisplay.EXPANDED and self.mode is not mode:
            self._pending = "".join(self._text)
            self._at_start = True
        self.mode = mode

    def done(self) -> list[RenderableType]:
        if self.mode is not ThinkingDisplay.EXPANDED:
            return []
        place = self._pending.rfind("\n")
        if place < 0 and len(self._pending) > _TAIL_CHARACTERS:
            place = self._pending.rfind(" ")
        if place < 0:
            return []
        text, self._pending = self._pending[:place], self._pending[place + 1 :]
        return self._lines(text)

    def live(self, now: float) -> list[RenderableType]:
        facts = self._facts(now) if self._started_at is not None else []
        head = Text(" · ".join([strings.THINKING, *facts]), style="thought")
        match self.mode:
            case ThinkingDisplay.COLLAPSED:
                return [head, BarredText(self._pending.strip("\n"), COLLAPSED_LINES)]
            case ThinkingDisplay.HIDDEN:
                return [head]
            case ThinkingDisplay.EXPANDED:
                return [BarredText(self._pending), head]

    def close(self, now: float) -> list[RenderableType]:
        shown = [*self.done(), *(self._lines(self._pending) if self._pending.strip() else ())]
        if self.mode is ThinkingDisplay.HIDDEN:
            return []
        seconds = self._seconds(now)
        head = strings.THOUGHT if seconds is None else strings.THOUGHT_FOR.format(time=format_seconds(seconds))
        summary = Text(" · ".join([head, *self._tokens()]), style="thought")
        return [*(shown if self.mode is ThinkingDisplay.EXPANDED else ()), summary]

    def _facts(self, now: float) -> list[str]:
        seconds = self._seconds(now)
        return [*([] if seconds is None else [format_seconds(seconds)]), *self._tokens()]

    def _seconds(self, now: float) -> float | None:
        """The thinking time of this block, with that before it was continued. None if it is not known."""
        if self._seconds_before is None or self._started_at is None:
            return None
        return self._seconds_before + now - self._started_at

    def _tokens(self) -> list[str]:
        count = self._token_count - self._tokens_before
        return [format_tokens(count)] if count else []

    def _lines(self, text: str) -> list[RenderableType]:
        text = text.lstrip("\n") if self._at_start else text
        self._at_start = self._at_start and not text
        return [BarredText(text)] if text else []


class ToolCallSection:
    """One call of a reply while its arguments are written."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments: list[str] = []

    def feed(self, arguments: str) -> None:
        self._arguments.append(arguments)

    def done(self) -> list[RenderableType]:
        return []

    def live(self, now: float) -> list[RenderableType]:
        return [Text.assemble((f"{_calls(self._name)} ", "call"), sanitize("".join(self._arguments))[-400:])]

    def close(self, now: float) -> list[RenderableType]:
        return format_call(self._name, "".join(self._arguments))


class BarredText:
    """Dim text with a bar at its left, so that thinking is recognisable without colours."""

    def __init__(self, text: str, max_lines: int = 0) -> None:
        self._text = text
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(
            self._text if not self._max_lines else self._text[-_TAIL_CHARACTERS:], style="thought", overflow="fold"
        )
        if not text.plain:
            return
        lines = console.render_lines(text, options.update(width=max(1, options.max_width - 2)), pad=False)
        for line in lines[-self._max_lines :] if self._max_lines else lines:
            yield Segment("│ ", console.get_style("thought"))
            yield from line
            yield Segment.line()


_SHADES = "░▒▓"
"""Masked tokens, by how sure the model is of what it would write there."""
_SURE = 0.9
"""Tokens from this confidence on are shown as settled."""


def draft_text(draft: DraftBlock, style: str = "") -> Text:
    """An unfinished block: masked tokens shaded, unsure ones dim."""
    found = Text(style=style, overflow="fold")
    for text, confidence in zip(draft.texts, draft.confidence, strict=True):
        if text is None:
            found.append(_SHADES[min(2, int(confidence * 3))], style="note")
        else:
            found.append(sanitize(text), style="" if confidence >= _SURE else "dim")
    return found


class TurnView(Protocol):
    """Shows one turn. TurnFollower passes it the events and calls `paint` regularly."""

    def handle(self, entry: LogEntry) -> None: ...

    def paint(self) -> None: ...

    def toggle(self) -> None: ...

    def close(self) -> None:
        """No more events follow, whether or not the turn ended."""
        ...

    @property
    def ending(self) -> Finished | Failed | None: ...

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds until the first output."""
        ...


class ReplyView:
    """Renders a reply on a live screen.

    Events up to `last_event` were shown before: they only restore the open section.
    """

    def __init__(
        self,
        screen: Screen,
        thinking_display: ThinkingDisplay,
        *,
        last_event: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._screen = screen
        self.thinking_display = thinking_display
        self._last_event = last_event
        self._thinking_seconds: float | None = 0.0
        """How long the reply had been thinking when the server sent `Started`; None if that is not known."""
        self._clock = clock
        self._requested_at = clock()
        self.time_to_first_token: float | None = None
        self._section: ReplySection | None = None
        self._thinking_tokens = 0
        self._done: list[RenderableType] = []
        self._has_output = False
        """Whether a part of the reply is on the screen."""
        self._queue_status = ""
        self._started = False
        self._muted = False
        self._draft: DraftBlock | None = None
        """The block that is being denoised."""
        self.ending: Finished | Failed | None = None

    def handle(self, entry: LogEntry) -> None:
        self._muted = self._was_shown(entry)
        self._handle(entry.event)
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
        """Switches thinking between expanded and collapsed."""
        self.thinking_display = (
            ThinkingDisplay.COLLAPSED if self.thinking_display is ThinkingDisplay.EXPANDED else ThinkingDisplay.EXPANDED
        )
        if isinstance(self._section, ThinkingSection):
            self._section.toggle(self.thinking_display)
        self.paint()

    def close(self) -> None:
        if self.ending is None:
            self._close()
            done, self._done = self._done, []
            self._screen.update(done)

    def _was_shown(self, entry: LogEntry) -> bool:
        always_shown = isinstance(entry.event, Finished | Failed | Waiting | DraftBlock)
        always_shown |= isinstance(entry.event, Started) and bool(entry.event.notice)
        return self._last_event > 0 and entry.number <= self._last_event and not always_shown

    def _handle(self, event: Event) -> None:
        match event:
            case Waiting(position, wait, loading, progress):
                self._queue_status = strings.QUEUED.format(position=position)
                if loading:
                    self._queue_status = loading_line(ModelCard(loading, ModelState.LOADING, progress))
                if wait:
                    self._queue_status = strings.QUEUED_WITH_TIME.format(
                        line=self._queue_status, time=format_seconds(wait)
                    )
            case Started(notice=notice, thinking_seconds=seconds):
                self._queue_status, self._started, self._thinking_seconds = "", True, seconds
                if notice:
                    self._add([Text(one_line(notice), style="note")])
                if isinstance(self._section, ThinkingSection):  # opened by the prompt, before a stop or a reconnect
                    self._section.start_timer(self._clock(), seconds)
            case Snapshot(message):
                self._replay(message)
            case DraftBlock():
                self._started, self._draft = True, event
            case Finished() | Failed():
                self._end(event)
            case _:
                self._draft = None
                if not self._muted and not isinstance(event, PhaseOpened):  # the prompt may open a phase as well
                    self._mark_first_token()
                self._read(event)

    def _mark_first_token(self) -> None:
        if not self._started and isinstance(self._section, ThinkingSection):
            self._section.start_timer(self._clock(), self._thinking_seconds)
        self._started = True
        if self.time_to_first_token is None:
            self.time_to_first_token = self._clock() - self._requested_at

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
                self._section = ToolCallSection(name)
            case ToolCallDelta(_, arguments):
                self._open(ToolCallSection).feed(arguments)
            case Notice(text):
                self._add([Text(text, style="note")])
            case _:
                assert_never(event)

    def _count(self, tokens: int) -> None:
        """Sets the thinking tokens of the reply so far."""
        self._thinking_tokens = max(self._thinking_tokens, tokens)
        if isinstance(self._section, ThinkingSection):
            self._section.set_token_count(tokens)

    def _replay(self, message: Message) -> None:
        for part in message.parts:
            match part:
                case Thinking(text):
                    self._thinking_seconds = None  # how long it took is not known
                    self._read(ThinkingDelta(text))
                case TextPart(text):
                    self._read(AnswerDelta(text))
                case ToolCall(id, name, arguments):
                    self._read(ToolCallOpened(0, id, name))
                    self._read(ToolCallDelta(0, arguments))
                case _:
                    pass

    def _open(self, kind: type[ReplySection]) -> ReplySection:
        """The open section, or a new one if the open section is of another kind."""
        if self._section is None or not isinstance(self._section, kind):
            self._close()
            self._section = self._new_thinking_section() if kind is ThinkingSection else kind()
        return self._section

    def _new_thinking_section(self) -> ThinkingSection:
        """The thinking time starts after prefill, even if the prompt opens the section."""
        now = self._clock() if self._started else None
        is_first = not self._thinking_tokens
        before = self._thinking_seconds if is_first or self._thinking_seconds is None else 0.0
        if self._muted and not is_first:  # of several blocks only the time of all is known
            before = None
        return ThinkingSection(self.thinking_display, now, self._thinking_tokens, before)

    def _close(self) -> None:
        if self._section is not None:
            self._add(self._section.close(self._clock()))
            gap = not self._muted and isinstance(self._section, ThinkingSection) and self._has_output
            self._section = None
            if gap:
                self._done.append(Text())

    def _add(self, shown: list[RenderableType]) -> None:
        if shown and not self._muted:
            self._done += shown
            self._has_output = True

    def _end(self, ending: Finished | Failed) -> None:
        for event in ending.tail:
            self._read(event)
        draft = self._live_draft()
        self._close()
        if draft and isinstance(ending, Finished) and ending.finish is Finish.STOPPED:
            self._add([Text(strings.UNFINISHED_BLOCK, style="note"), *draft])
        done, self._done = self._done, []
        self._screen.update(done)
        self.ending = ending

    def _live_draft(self) -> list[RenderableType]:
        """The unfinished block, unless it is a thought that is hidden."""
        thinking = isinstance(self._section, ThinkingSection)
        if self._draft is None or (thinking and self.thinking_display is ThinkingDisplay.HIDDEN):
            return []
        return [draft_text(self._draft, "thought" if thinking else "")]

    def _live(self) -> list[RenderableType]:
        now = self._clock()
        shown = self._section.live(now) if self._section is not None else []
        shown = [*shown, *self._live_draft()]
        if self._started or now - self._requested_at < _STATUS_DELAY_SECONDS:
            return shown
        return [
            *shown,
            Text(
                strings.WAITING.format(
                    what=self._queue_status or strings.READING_PROMPT, time=format_seconds(now - self._requested_at)
                ),
                style="note",
            ),
        ]


def render_thinking(thoughts: Iterable[str]) -> list[RenderableType]:
    """The thinking of a stored reply, in full."""
    return [BarredText(sanitize(thought).strip("\n")) for thought in thoughts if thought.strip()]


def format_call(name: str, arguments: str) -> list[RenderableType]:
    """`calls weather(city="Oslo")`, or the arguments below the name if they are long or not an object."""
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return [Text.assemble((f"{_calls(name)} ", "call"), sanitize(arguments)), _not_json()]
    short = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in _items(values))
    if isinstance(values, dict) and len(short) <= _MAX_INLINE_ARGUMENTS:
        return [Text.assemble((_calls(name), "call"), sanitize(f"({short})"))]
    text = json.dumps(values, ensure_ascii=False, indent=2)
    return [Text(_calls(name), style="call"), highlight_code(sanitize(text), "json")]


def _calls(name: str) -> str:
    return strings.CALLS.format(name=sanitize(name))


def unanswered_calls(calls: Iterable[ToolCall], answered: Iterable[str]) -> list[ToolCall]:
    known = set(answered)
    return [call for call in calls if call.id not in known]


def _items(values: object) -> list[tuple[str, object]]:
    return list(values.items()) if isinstance(values, dict) else []


def _not_json() -> Text:
    return Text(strings.BAD_ARGUMENTS, style="note")
