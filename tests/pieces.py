"""A vocabulary that grows as a test cuts its text into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn


class Pieces(Sequence[bytes]):
    def __init__(self, first: Sequence[bytes] = ()) -> None:
        self._pieces = list(first)
        self._ids: dict[bytes, int] = {}

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | Sequence[bytes]:
        return self._pieces[place]

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: bytes) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


@st.composite
def cuts(draw: DrawFn, whole: bytes) -> list[bytes]:
    """Draws a split of the bytes at random positions."""
    places = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True) if a < b]
