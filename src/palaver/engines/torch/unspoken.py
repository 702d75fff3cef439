"""What an answer that is read aloud may not say: tokens that hold a character unfit for speech.

Thinking and calls are never read aloud, so nothing is banned there, nor is any marker that leads to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from palaver.engines.reply import Reply
from palaver.engines.torch.banned import Spelling
from palaver.phases import Phase, Phases, State
from palaver.spoken import unfit_characters

_KEPT = 64
"""How many sets of tokens are remembered; a model's format has only a few states."""


class Markers(NamedTuple):
    """The text that leads out of a state: at its beginning, and after something visible was said."""

    first: tuple[bytes, ...]
    after: tuple[bytes, ...]


class UnfitTokens:
    """A vocabulary's tokens that are unfit for speech. Made once for a model."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        unfit = [character.encode() for character in unfit_characters()]
        self._pattern = re.compile(b"|".join(map(re.escape, unfit)))
        self._ids = [i for i, text in enumerate(spelling.vocabulary) if self._pattern.search(text)]
        self._rests = _rests(unfit)
        self._completing: dict[bytes, list[int]] = {}
        self._banned: dict[tuple[Markers, frozenset[int], int], Tensor] = {}

    def banned(self, markers: Markers, control: frozenset[int], size: int) -> Tensor:
        """All but control tokens and those that begin a marker."""
        key = (markers, control, size)
        if key not in self._banned:
            if len(self._banned) >= _KEPT:
                self._banned.clear()
            text = self.spelling.vocabulary
            found = [i for i in self._ids if i < size and i not in control and not self._begins(text[i], markers)]
            self._banned[key] = torch.tensor(found, dtype=torch.long)
        return self._banned[key]

    def completing(self, tail: bytes) -> list[int]:
        """Tokens that complete an unfit character which the text has begun: some are written byte by byte."""
        for size in range(1, min(len(tail), 3) + 1):
            begun = tail[-size:]
            if begun in self._rests:
                if begun not in self._completing:
                    rests = self._rests[begun]
                    self._completing[begun] = [i for rest in rests for i in self.spelling.beginning_with(rest)]
                return self._completing[begun]
        return []

    def holds(self, text: bytes) -> bool:
        return self._pattern.search(text) is not None

    def _begins(self, text: bytes, markers: Markers) -> bool:
        """Whether all that is unfit in the text belongs to a marker, whole or begun."""
        unfit = self._pattern.search(text)
        assert unfit is not None
        for at in range(unfit.start() + 1):
            rest, where = text[at:], markers.after if text[:at].strip() else markers.first
            if any(marker.startswith(rest) or rest.startswith(marker) for marker in where):
                return True
        return False


class Unspoken:
    """For one reply."""

    def __init__(self, phases: Phases, control: frozenset[int], tokens: UnfitTokens) -> None:
        self._phases = phases
        self._control = control
        self._tokens = tokens
        self._banned: dict[int, Tensor] = {}
        """By state."""

    def forbid(self, scores: Tensor, reply: Reply) -> None:
        state = self._phases.states[reply.state]
        if not self._is_spoken(state):
            return
        if self._tokens.holds(reply.held):
            self._go_on(scores, state, reply.held)
            return
        scores.index_fill_(0, self._ids(reply.state, scores), -torch.inf)
        tail = self._tail(reply.ids)
        if tail and tail[-1] >= 0x80 and (completing := self._tokens.completing(tail)):
            scores[[i for i in completing if i < scores.shape[0]]] = -torch.inf

    def _ids(self, place: int, scores: Tensor) -> Tensor:
        if place not in self._banned:
            markers = self._markers(self._phases.states[place])
            found = self._tokens.banned(markers, self._control, scores.shape[0])
            self._banned[place] = found.to(scores.device)
        return self._banned[place]

    def _is_spoken(self, state: State) -> bool:
        """Whether what is said now is answer, or becomes answer where it is no marker."""
        if state.phase is Phase.CONTROL and state.other is not None:
            return self._phases.states[state.other].phase is Phase.ANSWER
        return state.phase is Phase.ANSWER

    def _markers(self, state: State) -> Markers:
        after = state if state.other is None else self._phases.states[state.other]
        return Markers(_texts(state), _texts(after))

    def _go_on(self, scores: Tensor, state: State, held: bytes) -> None:
        """What is held back is unfit as text, so it must become the marker that it has begun."""
        rests = [marker[len(held) :] for marker in _texts(state) if marker.startswith(held)]
        spelling = self._tokens.spelling
        allowed = {i for rest in rests for i in spelling.beginning_with(rest)}
        begun = (rest[:size] for rest in rests for size in range(1, len(rest)))
        allowed.update(i for text in begun for i in spelling.spelling_exactly(text))
        kept = torch.tensor(sorted(i for i in allowed - self._control if i < scores.shape[0]), dtype=torch.long)
        values = scores[kept]
        scores.fill_(-torch.inf)
        scores[kept] = values

    def _tail(self, said: Sequence[int]) -> bytes:
        """The last bytes of text, as many as a character may have begun with."""
        tail = b""
        vocabulary = self._tokens.spelling.vocabulary
        for token_id in reversed(said):
            if len(tail) >= 3 or token_id in self._control or token_id >= len(vocabulary):
                break
            tail = vocabulary[token_id] + tail
        return tail


def _texts(state: State) -> tuple[bytes, ...]:
    return tuple(trigger.marker for trigger in state.triggers if isinstance(trigger.marker, bytes))


def _rests(characters: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """What is left of each character, by how it begins."""
    found: dict[bytes, list[bytes]] = {}
    for character in characters:
        for size in range(1, len(character)):
            found.setdefault(character[:size], []).append(character[size:])
    return found
