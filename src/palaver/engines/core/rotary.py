"""Rotary embeddings whose angles depend on the position alone: frequencies from a configuration, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

TABLE_VERSION = 2
"""Part of fingerprints: raise it where the numbers of `RotaryTable` may change."""
MIN_POSITIONS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """The angle of each pair of a head at position 1, and the factor of all cosines and sines."""

    angles: Floats
    scaling: float


def default_frequencies(theta: float, head_dim: int) -> Floats:
    return (np.float32(1) / _wavelengths(theta, head_dim)).astype(np.float32)


def linear_frequencies(theta: float, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """All positions are divided by the factor."""
    return default_frequencies(theta, head_dim) / np.float32(rope["factor"])


def llama3_frequencies(theta: float, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """Long waves are divided by the factor, short ones stay, and those between are blended."""
    angles = default_frequencies(theta, head_dim)
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    waves = np.float32(2 * math.pi) / angles
    blend = (np.float32(length) / waves - np.float32(low)) / np.float32(high - low)
    divided = angles / np.float32(rope["factor"])
    blended = (np.float32(1) - blend) * divided + blend * angles
    long, short = waves > np.float32(length / low), waves < np.float32(length / high)
    return np.where(long, divided, np.where(short, angles, blended)).astype(np.float32)


def yarn_frequencies(theta: float, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """As llama3, with a linear ramp between the pairs that turn `beta_fast` and `beta_slow` times."""
    waves = _wavelengths(theta, head_dim)
    length = rope["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    ramp = ((np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)).clip(0, 1)
    kept = np.float32(1) - ramp
    stretched = np.float32(1) / (np.float32(rope["factor"]) * waves)
    return (stretched * (np.float32(1) - kept) + (np.float32(1) / waves) * kept).astype(np.float32)


def yarn_scaling(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(mscale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1)


def _wavelengths(theta: float, head_dim: int) -> Floats:
    """How many positions each pair takes to turn by one radian."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    waves: Floats = np.power(float(theta), exponents.astype(np.float64)).astype(np.float32)
    return waves


class RotaryTable:
    """The cosine and the sine of each pair at each position, side by side: float32 [positions, pairs, 2].

    Angles are float32 products, as in the transformers library; their cosines and sines are rounded once."""

    def __init__(self, frequencies: Frequencies, max_position: int) -> None:
        self._frequencies = frequencies
        self._max_position = max_position
        self._table = np.empty((0, len(frequencies.angles), 2), np.float32)

    def up_to(self, position: int) -> Floats:
        """The table with this position in it; a later position may replace it."""
        if position >= len(self._table):
            self._table = self._build(min(self._max_position, max(2 * position, MIN_POSITIONS)) + 1)
        return self._table

    def _build(self, positions: int) -> Floats:
        angles = np.arange(positions, dtype=np.float32)[:, None] * self._frequencies.angles
        exact, scaling = angles.astype(np.float64), np.float32(self._frequencies.scaling)
        table = np.empty((*angles.shape, 2), np.float32)
        table[..., 0] = np.cos(exact).astype(np.float32) * scaling
        table[..., 1] = np.sin(exact).astype(np.float32) * scaling
        return table
