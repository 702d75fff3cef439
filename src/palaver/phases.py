"""Phases of a reply: a small serialisable automaton, and the tracker that runs it over tokens.

A format hands the automaton over; the engine and the reader run the same tracker, so both agree at every
token on whether the model is thinking, answering or calling a tool.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from palaver.constraints import Marked

Vocabulary = Sequence[bytes]
"""The bytes each token id stands for, markers included."""


class Phase(StrEnum):
    THINKING = "thinking"
    ANSWER = "answer"
    TOOL_CALL = "tool_call"
    CONTROL = "control"
    """Headers and glue: read, but said to nobody."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Trigger:
    """What leads to another state: a token id, or the bytes of a marker that is ordinary text."""

    marker: int | bytes
    to: int
    keep: bool = False
    """Whether the marker's own bytes are said in the new state (a call that begins with its own brace)."""


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase
    triggers: tuple[Trigger, ...] = ()
    closing: tuple[int, ...] = ()
    """Token ids that lead from here to the answer, as the model itself would write them."""
    other: int | None = None
    """Where visible text that is no marker leads; it is said there. None: it is said here."""
    quotes: bytes = b""
    """The quotation marks inside which the bytes of a marker are text."""
    slot: str = ""
    """What the text said here is to the reader of the format; the engine does not ask."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a reply must say beside its thoughts, markers and all; it can't end before."""

    first: Marked
    """From its beginning on; a thought may open it."""
    later: Marked
    """Behind a thought."""


@dataclass(frozen=True, slots=True)
class Phases:
    states: tuple[State, ...]
    start: int = 0
    ends: frozenset[int] = frozenset()
    """Token ids that end the turn in any state."""
    hidden: frozenset[int] = frozenset()
    """Control token ids that are never text, where they are no trigger."""
    markers: frozenset[int] = frozenset()
    """Token ids of the format's markers: text in a tool call's arguments alone, where they are no trigger."""
    held: Held | None = None

    @property
    def opens_in(self) -> Phase:
        return self.states[self.start].phase


PLAIN = Phases(states=(State(Phase.ANSWER),))
"""A reply that is all answer."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The reply is in `state` now; `marker` are the bytes that led there, none where text that is no marker did."""

    state: int
    marker: bytes


@dataclass(frozen=True, slots=True)
class Said:
    state: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was met in the answer; nothing is said after it."""

    stop: str


Happening = Entered | Said | Stopped


class Scanner:
    """Finds the leftmost longest of some byte strings in a stream, releasing what can't be part of a match."""

    def __init__(self, patterns: Iterable[bytes]) -> None:
        self._patterns = sorted(set(patterns))
        self._longest = max(map(len, self._patterns), default=0)
        self._first = re.compile(b"|".join({re.escape(p[:1]) for p in self._patterns}))
        self.held = b""

    def feed(self, data: bytes) -> tuple[bytes, bytes | None, bytes]:
        """Returns what is released, the pattern that was met (if any) and what came after it."""
        if not self._patterns or not (self.held or self._first.search(data)):
            return data, None, b""
        text, self.held = self.held + data, b""
        start = self._hold(text)
        at, met = self._search(text)
        if met is not None and at < start:
            return text[:at], met, text[at + len(met) :]
        self.held = text[start:]
        return text[:start], None, b""

    def end(self) -> tuple[bytes, bytes | None, bytes]:
        """As `feed`, now that nothing more comes: what might have grown into a longer match no longer does."""
        text, self.held = self.held, b""
        at, met = self._search(text)
        return (text, None, b"") if met is None else (text[:at], met, text[at + len(met) :])

    def _search(self, text: bytes) -> tuple[int, bytes | None]:
        """The leftmost pattern, and the longest of those that begin there."""
        found = [(at, -len(pattern), pattern) for pattern in self._patterns if (at := text.find(pattern)) >= 0]
        at, _, met = min(found, default=(0, 0, None))
        return at, met

    def _hold(self, text: bytes) -> int:
        """From where on the text may still become a pattern."""
        for begin in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            if self._starts(text[begin.start() :]):
                return begin.start()
        return len(text)

    def _starts(self, text: bytes) -> bool:
        """Whether a pattern begins with this and goes on."""
        at = bisect_right(self._patterns, text)
        return at < len(self._patterns) and self._patterns[at].startswith(text)


class _Quoting:
    """Whether a place in the text lies inside quotation marks."""

    def __init__(self, marks: bytes) -> None:
        self._mark = re.compile(b"[" + re.escape(marks) + b"]") if marks else None
        self._open: re.Pattern[bytes] | None = None
        self._escaped = False

    def plain(self, data: bytes) -> tuple[bytes, bytes]:
        """What comes before the next quotation mark, and the rest from the mark on."""
        found = self._mark.search(data) if self._mark else None
        return (data, b"") if found is None else (data[: found.start()], data[found.start() :])

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """The quoted text that the data begins with, and the rest."""
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
    """Runs the automaton over the tokens of one reply. Feeding the same tokens gives the same happenings."""

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
    def held(self) -> bytes:
        """What is held back because it may become a marker."""
        return self._markers.held

    def feed(self, token_id: int) -> list[Happening]:
        """What this token made certain. A token that ends the turn says nothing."""
        if self.ended:
            return []
        if token_id not in self._by_id and token_id not in self._phases.ends:
            return [] if self._is_hidden(token_id) else self._say(self._bytes(token_id))
        out = self._release()
        if self.ended:
            return out
        trigger = self._by_id.get(token_id)
        if trigger is not None:
            return [*out, *self._follow(trigger, self._bytes(token_id), b"")]
        self.ended = token_id in self._phases.ends
        return out

    def flush(self) -> list[Happening]:
        """What is held back because it might have become a marker or a stop string; the stream ends here."""
        return self._release()

    def _is_hidden(self, token_id: int) -> bool:
        """Whether the token is not shown where it leads nowhere. Arguments keep what the model wrote."""
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
        self._quoting = _Quoting(here.quotes)
        self._stop_scanner = Scanner(self._stops if here.phase is Phase.ANSWER else ())
        if here.phase is Phase.END:
            self.ended = True

    def _follow(self, trigger: Trigger, marker: bytes, rest: bytes) -> list[Happening]:
        self._enter(trigger.to)
        entered = Entered(trigger.to, marker)
        if self.ended:
            return [entered]
        return [entered, *self._say(marker + rest if trigger.keep else rest)]

    def _say(self, data: bytes) -> list[Happening]:
        """Looks for markers outside of quotation marks and says the rest."""
        out: list[Happening] = []
        while data and not self.ended:
            quoted, data = self._quoting.take(data)
            plain, data = (b"", data) if quoted else self._quoting.plain(data)
            said, marker, rest = self._markers.end() if quoted else self._markers.feed(plain)
            said, data = (said + quoted, data) if marker is None else (said, quoted + data)
            if self._leads_away(said):
                return [*out, *self._lead_away(said, (marker or b"") + rest + self._markers.held + data)]
            out += self._stop_or_say(*self._stop_scanner.feed(said))
            if marker is not None and not self.ended:
                return self._met(out, marker, rest + data)
        return out

    def _leads_away(self, said: bytes) -> bool:
        return self._phases.states[self.state].other is not None and bool(said.strip())

    def _lead_away(self, said: bytes, rest: bytes) -> list[Happening]:
        """White space is said here, all from the first visible byte on where such text leads."""
        other = self._phases.states[self.state].other
        assert other is not None
        visible = said.lstrip()
        out = self._stop_or_say(*self._stop_scanner.feed(said[: len(said) - len(visible)]))
        return out if self.ended else [*out, *self._go_on_in(other, visible + rest)]

    def _go_on_in(self, other: int, data: bytes) -> list[Happening]:
        """Within the same phase nothing is entered and a stop string may span both states."""
        if self._phases.states[other].phase is self.phase:
            held = self._stop_scanner.held
            self._enter(other)
            self._stop_scanner.held = held
            return self._say(data)
        out = self._release_stop()
        if self.ended:
            return out
        self._enter(other)
        return [*out, Entered(other, b""), *self._say(data)]

    def _release(self) -> list[Happening]:
        """Says what is held back; a marker that might have grown into a longer one is followed."""
        if self.ended:
            return []
        said, marker, rest = self._markers.end()
        if self._leads_away(said):
            return [*self._lead_away(said, (marker or b"") + rest), *self._release()]
        out = self._met(self._stop_or_say(*self._stop_scanner.feed(said)), marker, rest)
        return [*out, *(self._release() if marker else self._release_stop())]

    def _met(self, out: list[Happening], marker: bytes | None, rest: bytes) -> list[Happening]:
        if marker is None or self.ended:
            return out
        out += self._release_stop()
        return out if self.ended else [*out, *self._follow(self._by_bytes[marker], marker, rest)]

    def _release_stop(self) -> list[Happening]:
        return [] if self.ended else self._stop_or_say(*self._stop_scanner.end())

    def _stop_or_say(self, said: bytes, stop: bytes | None, _: bytes) -> list[Happening]:
        out: list[Happening] = [Said(self.state, said)] if said else []
        if stop is not None:
            self.ended = True
            out.append(Stopped(self._stops[stop]))
        return out
