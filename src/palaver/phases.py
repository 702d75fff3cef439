"""Phases of a reply: a small serialisable state machine, and the tracker that runs it over tokens.

A format builds the state machine. The engine and the reader run the same tracker, so both agree at every token on
whether the model is thinking, answering or calling a tool.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from palaver.constraints import MarkerConstraint

Vocabulary = Sequence[bytes]
"""The bytes each token id stands for, markers included."""


class Phase(StrEnum):
    THINKING = "thinking"
    ANSWER = "answer"
    TOOL_CALL = "tool_call"
    CONTROL = "control"
    """Headers and glue: parsed, but not part of the message."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A transition to another state, on a token id or on the bytes of a marker that is ordinary text."""

    marker: int | bytes
    to: int
    keep: bool = False
    """Whether the marker's own bytes are text of the new state (a call that begins with its own brace)."""


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase
    triggers: tuple[Trigger, ...] = ()
    closing: tuple[int, ...] = ()
    """Token ids that lead from here to the answer, as the model itself would write them."""
    other: int | None = None
    """The state that visible text without a marker leads to, and belongs to. None: it belongs to this state."""
    quotes: bytes = b""
    """Quotation marks; between them the bytes of a marker are text."""
    slot: str = ""
    """What the text of this state means to the format's reader. The engine does not use it."""


@dataclass(frozen=True, slots=True)
class RequiredGrammar:
    """The grammar of a reply beside its thoughts, markers included. The reply can't end before it is complete."""

    first: MarkerConstraint
    """From the start of the reply; it may open with a thought."""
    later: MarkerConstraint
    """After a thought."""


@dataclass(frozen=True, slots=True)
class Phases:
    states: tuple[State, ...]
    start: int = 0
    ends: frozenset[int] = frozenset()
    """Token ids that end the turn in any state."""
    hidden: frozenset[int] = frozenset()
    """Control token ids that are never text; triggers take precedence."""
    markers: frozenset[int] = frozenset()
    """Token ids of the format's markers: text only in the arguments of a tool call. Triggers take precedence."""
    held: RequiredGrammar | None = None
    may_think: bool = True
    """Whether the model may open a thought before an answer with a constraint. It may not if thinking is off."""

    @property
    def opens_in(self) -> Phase:
        return self.states[self.start].phase


PLAIN = Phases(states=(State(Phase.ANSWER),))
"""A reply that consists of an answer only."""


@dataclass(frozen=True, slots=True)
class StateEntered:
    """The reply entered `state`. `marker` is the bytes of the trigger, empty where plain text led there."""

    state: int
    marker: bytes


@dataclass(frozen=True, slots=True)
class StateText:
    """Text of a state."""

    state: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string occurred in the answer, which ends before it."""

    stop: str


TrackerEvent = StateEntered | StateText | StopMatched


class Scanner:
    """Finds the leftmost longest of some byte strings in a stream. Bytes that can't be part of a match are released."""

    def __init__(self, patterns: Iterable[bytes]) -> None:
        self._patterns = sorted(set(patterns))
        self._longest = max(map(len, self._patterns), default=0)
        self._first = re.compile(b"|".join({re.escape(p[:1]) for p in self._patterns}))
        self.buffered = b""

    def feed(self, data: bytes) -> tuple[bytes, bytes | None, bytes]:
        """Returns the released bytes, the matched pattern (if any) and the bytes after it."""
        if not self._patterns or not (self.buffered or self._first.search(data)):
            return data, None, b""
        text, self.buffered = self.buffered + data, b""
        start = self._partial_start(text)
        at, pattern = self._search(text)
        if pattern is not None and at < start:
            return text[:at], pattern, text[at + len(pattern) :]
        self.buffered = text[start:]
        return text[:start], None, b""

    def passes(self, data: bytes) -> bool:
        """Whether `feed` would release exactly these bytes."""
        return not self.buffered and (not self._patterns or not self._first.search(data))

    def end(self) -> tuple[bytes, bytes | None, bytes]:
        """As `feed`, at the end of the stream: buffered bytes are matched without waiting for a longer match."""
        text, self.buffered = self.buffered, b""
        at, pattern = self._search(text)
        return (text, None, b"") if pattern is None else (text[:at], pattern, text[at + len(pattern) :])

    def _search(self, text: bytes) -> tuple[int, bytes | None]:
        """The position of the leftmost pattern, and the longest pattern there."""
        found = [(at, -len(pattern), pattern) for pattern in self._patterns if (at := text.find(pattern)) >= 0]
        at, _, longest = min(found, default=(0, 0, None))
        return at, longest

    def _partial_start(self, text: bytes) -> int:
        """The position from which on the text may still become a pattern."""
        for begin in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            if self._is_partial(text[begin.start() :]):
                return begin.start()
        return len(text)

    def _is_partial(self, text: bytes) -> bool:
        """Whether some longer pattern starts with this text."""
        at = bisect_right(self._patterns, text)
        return at < len(self._patterns) and self._patterns[at].startswith(text)


class _QuoteSplitter:
    """Splits a stream into text inside and outside of quotation marks."""

    def __init__(self, marks: bytes) -> None:
        self._mark = re.compile(b"[" + re.escape(marks) + b"]") if marks else None
        self._open: re.Pattern[bytes] | None = None
        self._escaped = False

    def has_none(self, data: bytes) -> bool:
        """Whether all of the data is outside of quotation marks."""
        return self._mark is None or (self._open is None and self._mark.search(data) is None)

    def stays_quoted(self, data: bytes) -> bool:
        """Whether all of the data is quoted text, and more may follow."""
        return self._open is not None and not self._escaped and self._open.search(data) is None

    def split_plain(self, data: bytes) -> tuple[bytes, bytes]:
        """The text up to the next quotation mark, and the rest."""
        found = self._mark.search(data) if self._mark else None
        return (data, b"") if found is None else (data[: found.start()], data[found.start() :])

    def split_quoted(self, data: bytes) -> tuple[bytes, bytes]:
        """The quoted text at the start of the data, and the rest."""
        if self._open is None:
            mark = self._mark.match(data) if self._mark else None
            if mark is None:
                return b"", data
            self._open = re.compile(rb"\\|" + mark[0])
            return data[:1], data[1:]
        at = int(self._escaped)
        self._escaped = False
        while found := self._open.search(data, at):
            if found[0] != b"\\":
                self._open = None
                return data[: found.end()], data[found.end() :]
            at = found.end() + 1
        self._escaped = at > len(data)
        return data, b""


class Tracker:
    """Runs the state machine over the tokens of one reply. The events depend on the tokens only."""

    def __init__(self, phases: Phases, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._phases = phases
        self._vocabulary = vocabulary
        self._stops = {stop.encode(): stop for stop in stops if stop}
        self.ended = False
        self._enter(phases.start)

    @property
    def phase(self) -> Phase:
        return self._phases.states[self.state].phase

    @property
    def holds_text(self) -> bool:
        """Whether bytes are held back because they may become a marker or a stop string."""
        return bool(self._markers.buffered or self._stop_scanner.buffered)

    @property
    def buffered(self) -> bytes:
        """Bytes that are held back because they may become a marker."""
        return self._markers.buffered

    def plain_text(self, token_id: int) -> bytes | None:
        """The bytes of a token that is text of the current state and nothing else, as most are. The caller then need
        not feed it. None: it may lead to another state, or its bytes may be held back."""
        if not self._can_be_plain or self._markers.buffered or self._stop_scanner.buffered or self.ended:
            return None
        data = self._plain.get(token_id)
        if data is None and self._is_plain(token_id):
            data = self._plain[token_id] = self._vocabulary[token_id]
        return data

    def feed(self, token_id: int) -> list[TrackerEvent]:
        """The events that this token completes. A token that ends the turn has no text."""
        if self.ended:
            return []
        if (text := self.plain_text(token_id)) is not None:
            return [StateText(self.state, text)]
        if token_id not in self._by_id and token_id not in self._phases.ends:
            return [] if self._is_hidden(token_id) else self._feed_text(self._bytes(token_id))
        out = self._release()
        if self.ended:
            return out
        trigger = self._by_id.get(token_id)
        if trigger is not None:
            return [*out, *self._follow(trigger, self._bytes(token_id), b"")]
        self.ended = token_id in self._phases.ends
        return out

    def flush(self) -> list[TrackerEvent]:
        """The end of the stream: events for bytes held back as a possible marker or stop string."""
        return self._release()

    def _is_plain(self, token_id: int) -> bool:
        """Whether the token is plain text in this state whenever no bytes are held back."""
        if token_id in self._by_id or token_id in self._phases.ends or self._is_hidden(token_id):
            return False
        data = self._bytes(token_id)
        return bool(data) and self._markers.passes(data) and self._stop_scanner.passes(data)

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token that is no trigger has no text. Arguments of a call keep the markers the model wrote."""
        if token_id in self._phases.hidden:
            return True
        return token_id in self._phases.markers and self.phase is not Phase.TOOL_CALL

    def _bytes(self, token_id: int) -> bytes:
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""

    def _enter(self, state: int) -> None:
        self.state = state
        here = self._phases.states[state]
        self._by_id = {t.marker: t for t in here.triggers if isinstance(t.marker, int)}
        self._by_bytes = {t.marker: t for t in here.triggers if isinstance(t.marker, bytes)}
        self._markers = Scanner(self._by_bytes)
        self._quotes = _QuoteSplitter(here.quotes)
        self._leads_nowhere = here.other is None
        self._can_be_plain = self._leads_nowhere and not here.quotes
        self._plain: dict[int, bytes] = {}
        """Tokens that are plain text in this state."""
        self._stop_scanner = Scanner(self._stops if here.phase is Phase.ANSWER else ())
        if here.phase is Phase.END:
            self.ended = True

    def _follow(self, trigger: Trigger, marker: bytes, rest: bytes) -> list[TrackerEvent]:
        self._enter(trigger.to)
        entered = StateEntered(trigger.to, marker)
        if self.ended:
            return [entered]
        return [entered, *self._feed_text(marker + rest if trigger.keep else rest)]

    def _feed_text(self, data: bytes) -> list[TrackerEvent]:
        """Follows markers outside of quotation marks; the rest is text of the current state."""
        if data and self._leads_nowhere and self._is_text(data):
            return [StateText(self.state, data)]
        out: list[TrackerEvent] = []
        while data and not self.ended:
            quoted, data = self._quotes.split_quoted(data)
            plain, data = (b"", data) if quoted else self._quotes.split_plain(data)
            text, marker, rest = self._markers.end() if quoted else self._markers.feed(plain)
            text, data = (text + quoted, data) if marker is None else (text, quoted + data)
            if self._leaves_state(text):
                return [*out, *self._leave_state(text, (marker or b"") + rest + self._markers.buffered + data)]
            out += self._emit(*self._stop_scanner.feed(text))
            if marker is not None and not self.ended:
                return self._follow_marker(out, marker, rest + data)
        return out

    def _is_text(self, data: bytes) -> bool:
        """Whether the data is text at once: no part of a marker, a quotation mark or a stop string. Most tokens are."""
        if self._quotes.stays_quoted(data):
            return not self._markers.buffered and self._stop_scanner.passes(data)
        return self._quotes.has_none(data) and self._markers.passes(data) and self._stop_scanner.passes(data)

    def _leaves_state(self, text: bytes) -> bool:
        return self._phases.states[self.state].other is not None and bool(text.strip())

    def _leave_state(self, text: bytes, rest: bytes) -> list[TrackerEvent]:
        """White space belongs to this state; the first visible byte and all after it to `State.other`."""
        other = self._phases.states[self.state].other
        assert other is not None
        visible = text.lstrip()
        out = self._emit(*self._stop_scanner.feed(text[: len(text) - len(visible)]))
        return out if self.ended else [*out, *self._continue_in(other, visible + rest)]

    def _continue_in(self, other: int, data: bytes) -> list[TrackerEvent]:
        """Within the same phase there is no `Entered` event, and a stop string may span both states."""
        if self._phases.states[other].phase is self.phase:
            buffered = self._stop_scanner.buffered
            self._enter(other)
            self._stop_scanner.buffered = buffered
            return self._feed_text(data)
        out = self._release_stop()
        if self.ended:
            return out
        self._enter(other)
        return [*out, StateEntered(other, b""), *self._feed_text(data)]

    def _release(self) -> list[TrackerEvent]:
        """Releases buffered bytes. A marker that was waiting for a longer one is followed."""
        if self.ended:
            return []
        text, marker, rest = self._markers.end()
        if self._leaves_state(text):
            return [*self._leave_state(text, (marker or b"") + rest), *self._release()]
        out = self._follow_marker(self._emit(*self._stop_scanner.feed(text)), marker, rest)
        return [*out, *(self._release() if marker else self._release_stop())]

    def _follow_marker(self, out: list[TrackerEvent], marker: bytes | None, rest: bytes) -> list[TrackerEvent]:
        if marker is None or self.ended:
            return out
        out += self._release_stop()
        return out if self.ended else [*out, *self._follow(self._by_bytes[marker], marker, rest)]

    def _release_stop(self) -> list[TrackerEvent]:
        return [] if self.ended else self._emit(*self._stop_scanner.end())

    def _emit(self, text: bytes, stop: bytes | None, _: bytes) -> list[TrackerEvent]:
        out: list[TrackerEvent] = [StateText(self.state, text)] if text else []
        if stop is not None:
            self.ended = True
            out.append(StopMatched(self._stops[stop]))
        return out
