"""Random numbers that depend on (seed, choice, position in the reply) alone, so that nothing has to be remembered."""

from __future__ import annotations

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """A number from 0 up to, not including, 1."""
    state = _mix(seed & MASK)
    state = _mix(state ^ _mix((choice + GOLDEN) & MASK))
    state = _mix(state ^ _mix((position + 2 * GOLDEN) & MASK))
    return (state >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the input changes half of the output's."""
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
