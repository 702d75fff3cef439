"""Builds the state machine of a reply from markers given as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from palaver.formats.markers import split_marker
from palaver.phases import Phase, Phases, State, Trigger


@dataclass
class _StateDraft:
    phase: Phase
    slot: str = ""
    other: int | None = None
    quotes: bytes = b""
    closing: tuple[int, ...] = ()
    triggers: dict[int | bytes, Trigger] = field(default_factory=dict)


class StateMachineBuilder:
    """Add states first, then the markers between them. A marker of several parts becomes a chain of states."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._units: list[str] = []
        self._drafts: list[_StateDraft] = []
        self._chains: dict[tuple[int, int | bytes], int] = {}

    @property
    def size(self) -> int:
        return len(self._drafts)

    def states_in(self, phase: Phase) -> list[int]:
        return [state for state, draft in enumerate(self._drafts) if draft.phase is phase]

    @property
    def marker_ids(self) -> frozenset[int]:
        """The token ids of the markers so far."""
        return frozenset(key for draft in self._drafts for key in draft.triggers if isinstance(key, int))

    def add_unit(self, text: str) -> None:
        """Markers are never split inside of this text, as inside of a control token."""
        if text.strip():
            self._units.append(text)

    def split(self, marker: str) -> tuple[str, ...]:
        """The parts of a marker: control tokens, units, tags and words."""
        return split_marker(marker, [*self._control, *self._units])

    def add_state(self, phase: Phase, slot: str = "", quotes: bytes = b"") -> int:
        self._drafts.append(_StateDraft(phase, slot, quotes=quotes))
        return len(self._drafts) - 1

    def set_default(self, state: int, other: int) -> None:
        """Visible text that is no marker leads to another state."""
        self._drafts[state].other = other

    def set_closing(self, state: int, ids: tuple[int, ...]) -> None:
        """The token ids that lead from the state to the answer."""
        self._drafts[state].closing = ids

    def add_marker(self, state: int, marker: str, to: int, keep: bool = False, fallback: int | None = None) -> None:
        """The marker leads from the state to another. If it already leads elsewhere, the first one wins.

        Text that breaks off a marker of several parts leads to `fallback`, or else back to the state."""
        pieces = self.split(marker)
        if not pieces:
            return
        back = state if fallback is None else fallback
        for piece in pieces[:-1]:
            state = self._chain(state, self._key(piece), back)
        self._drafts[state].triggers.setdefault(
            self._key(pieces[-1]), Trigger(self._key(pieces[-1]), to, keep and len(pieces) == 1)
        )

    def add_text_marker(self, state: int, text: str, to: int, keep: bool = False) -> None:
        """The exact text, white space included, leads from the state to another."""
        key = self._key(text)
        self._drafts[state].triggers.setdefault(key, Trigger(key, to, keep))

    def keep_tokens(self, state: int, ids: frozenset[int], to: int) -> None:
        """Tokens that are markers elsewhere are text in this state; they lead to another state of its phase."""
        for token_id in sorted(ids):
            self._drafts[state].triggers.setdefault(token_id, Trigger(token_id, to, keep=True))

    def build(
        self, start: int, ends: frozenset[int], hidden: frozenset[int], markers: frozenset[int] = frozenset()
    ) -> Phases:
        states = tuple(
            State(d.phase, tuple(d.triggers.values()), d.closing, d.other, d.quotes, d.slot) for d in self._drafts
        )
        return Phases(states, start, ends, hidden, markers | self.marker_ids)

    def _chain(self, state: int, key: int | bytes, back: int) -> int:
        """The state after one part of a longer marker; other text leads back."""
        existing = self._drafts[state].triggers.get(key)
        if existing is not None and (state, key) not in self._chains:
            return existing.to
        if (state, key) not in self._chains:
            link = self.add_state(Phase.CONTROL)
            self.set_default(link, back)
            self._chains[state, key] = link
            self._drafts[state].triggers[key] = Trigger(key, link)
            self._drafts[link].triggers[key] = Trigger(key, link)  # a repeated part restarts the marker
        return self._chains[state, key]

    def _key(self, piece: str) -> int | bytes:
        return self._control.get(piece, piece.encode())
