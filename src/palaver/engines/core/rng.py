"""Random numbers by position: a number depends on seed, choice and position in the reply alone, so that a continued
reply draws the numbers of the uncut one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
BUFFERED = 64
"""Numbers that are computed at once."""
XTC_STREAM = 1
"""The stream of the numbers that decide whether XTC applies. Tokens are drawn with stream 0."""


def uniform(seed: int, choice: int, position: int, stream: int = 0) -> float:
    """A random number from 0 to 1, excluding 1, that depends on the arguments alone. Streams are independent of each
    other."""
    state = _mix(seed & MASK_64)
    state = _mix(state ^ _mix((choice + GOLDEN) & MASK_64))
    state = _mix(state ^ _mix((position + 2 * GOLDEN) & MASK_64))
    if stream:
        state = _mix(state ^ _mix((stream + 3 * GOLDEN) & MASK_64))
    return (state >> 11) * 2.0**-53


class UniformStream:
    """The numbers of one reply by position: `uniform`, computed for many positions at once."""

    def __init__(self, seed: int, choice: int, stream: int = 0) -> None:
        self._stream = stream
        self.state = _mix(_mix(seed & MASK_64) ^ _mix((choice + GOLDEN) & MASK_64))
        """What the seed and the choice come to. A number follows from it and the position."""
        self._start = 0
        self._numbers: Sequence[float] = ()

    def __getitem__(self, position: int) -> float:
        if not 0 <= position - self._start < len(self._numbers):
            self._start = position
            self._numbers = self._compute(position)
        return self._numbers[position - self._start]

    def _compute(self, start: int) -> list[float]:
        with np.errstate(over="ignore"):
            positions = np.arange(start, start + BUFFERED, dtype=np.uint64) + np.uint64(2 * GOLDEN & MASK_64)
            states = _mix_all(np.uint64(self.state) ^ _mix_all(positions))
            if self._stream:
                states = _mix_all(states ^ np.uint64(_mix((self._stream + 3 * GOLDEN) & MASK_64)))
        numbers: list[float] = ((states >> np.uint64(11)) * 2.0**-53).tolist()
        return numbers


def _mix_all(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of each number. Sums and products wrap around."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the input changes half of the output's."""
    x = (x + GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
