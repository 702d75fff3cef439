"""Stateless random numbers: each depends on (seed, choice, position in the reply) alone, so a reply can be restored."""

from __future__ import annotations

MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


XTC_STREAM = 1
"""The stream of the numbers that decide whether XTC applies. Tokens are drawn with stream 0."""


def uniform(seed: int, choice: int, position: int, stream: int = 0) -> float:
    """A number from 0 to 1, excluding 1. Streams are independent of each other."""
    state = _mix(seed & MASK_64)
    state = _mix(state ^ _mix((choice + GOLDEN) & MASK_64))
    state = _mix(state ^ _mix((position + 2 * GOLDEN) & MASK_64))
    if stream:
        state = _mix(state ^ _mix((stream + 3 * GOLDEN) & MASK_64))
    return (state >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the input changes half of the output's."""
    x = (x + GOLDEN) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
