"""Builds the automaton of a reply's phases from markers given as text."""

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
    """States first, then the markers between them. A marker of several parts becomes a chain of states."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._drafts: list[_StateDraft] = []
        self._chains: dict[tuple[int, int | bytes], int] = {}

    @property
    def size(self) -> int:
        return len(self._drafts)

    @property
    def marker_ids(self) -> frozenset[int]:
        """The markers so far that are tokens."""
        return frozenset(key for draft in self._drafts for key in draft.triggers if isinstance(key, int))

    def state(self, phase: Phase, slot: str = "", quotes: bytes = b"") -> int:
        self._drafts.append(_StateDraft(phase, slot, quotes=quotes))
        return len(self._drafts) - 1

    def leads(self, state: int, other: int) -> None:
        """Visible text in the state leads to another one."""
        self._drafts[state].other = other

    def closes(self, state: int, ids: tuple[int, ...]) -> None:
        self._drafts[state].closing = ids

    def on(self, state: int, marker: str, to: int, keep: bool = False, fallback: int | None = None) -> None:
        """The marker leads from the state to another. The first marker that claims a way keeps it."""
        pieces = split_marker(marker, self._control)
        if not pieces:
            return
        back = state if fallback is None else fallback
        for piece in pieces[:-1]:
            state = self._chain(state, self._key(piece), back)
        self._drafts[state].triggers.setdefault(
            self._key(pieces[-1]), Trigger(self._key(pieces[-1]), to, keep and len(pieces) == 1)
        )

    def on_text(self, state: int, text: str, to: int, keep: bool = False) -> None:
        """The text, white space and all, leads from the state to another."""
        key = self._key(text)
        self._drafts[state].triggers.setdefault(key, Trigger(key, to, keep))

    def build(
        self, start: int, ends: frozenset[int], hidden: frozenset[int], markers: frozenset[int] = frozenset()
    ) -> Phases:
        states = tuple(
            State(d.phase, tuple(d.triggers.values()), d.closing, d.other, d.quotes, d.slot) for d in self._drafts
        )
        return Phases(states, start, ends, hidden, markers | self.marker_ids)

    def _chain(self, state: int, key: int | bytes, back: int) -> int:
        """The state after one part of a longer marker; text that doesn't go on with it leads back."""
        known = self._drafts[state].triggers.get(key)
        if known is not None and (state, key) not in self._chains:
            return known.to
        if (state, key) not in self._chains:
            link = self.state(Phase.CONTROL)
            self.leads(link, back)
            self._chains[state, key] = link
            self._drafts[state].triggers[key] = Trigger(key, link)
            self._drafts[link].triggers[key] = Trigger(key, link)  # a model that stutters begins anew
        return self._chains[state, key]

    def _key(self, piece: str) -> int | bytes:
        return self._control.get(piece, piece.encode())
