"""Pictures as patches and sounds as log-mel frames, as transformers' own processors make them (tests compare them).

Both are kept as bytes: a resized picture has bytes anyway, and levels of sound lose nothing that matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PATCH, MERGE = 14, 2
CELL = PATCH * MERGE
PATCH_PIXELS = 3 * PATCH * PATCH
MIN_CELLS, MAX_CELLS = 20, 36
MIN_PIXELS, MAX_PIXELS = MIN_CELLS * CELL**2, MAX_CELLS * CELL**2
MAX_PATCHES = MAX_CELLS * MERGE**2
RATE, HOP, WINDOW, MELS = 16_000, 160, 400, 128
CHUNK = 200
"""Frames that the audio encoder hears at once: two seconds."""

Bytes = NDArray[np.uint8]
Wave = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Picture:
    """A resized picture: bytes of (patches, PATCH_PIXELS), in squares of four."""

    patches: Bytes
    rows: int
    columns: int

    @property
    def length(self) -> int:
        return self.rows * self.columns // MERGE**2

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows // MERGE, self.columns // MERGE


@dataclass(frozen=True, slots=True)
class Sound:
    """Bytes of (frames, MELS)."""

    frames: Bytes

    @property
    def length(self) -> int:
        return embeddings_of(len(self.frames))


Medium = Picture | Sound


def embeddings_of(frames: int) -> int:
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def fitting_size(height: int, width: int) -> tuple[int, int]:
    """Multiples of a cell near the picture's own size and shape, within the bounds on pixels."""
    rows, columns = round(height / CELL), round(width / CELL)
    if rows * columns * CELL**2 > MAX_PIXELS:
        by = math.sqrt(height * width / MAX_PIXELS)
        rows, columns = max(1, math.floor(height / by / CELL)), max(1, math.floor(width / by / CELL))
    elif rows * columns * CELL**2 < MIN_PIXELS:
        by = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = math.ceil(height * by / CELL), math.ceil(width * by / CELL)
    return rows * CELL, columns * CELL


def picture(image: Image.Image) -> Picture:
    height, width = fitting_size(image.height, image.width)
    pixels = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))
    rows, columns = height // PATCH, width // PATCH
    parts = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return Picture(parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, PATCH_PIXELS), rows, columns)


@cache
def _filters() -> NDArray[np.float32]:
    """Slaney's triangular mel filters of (WINDOW / 2 + 1, MELS)."""
    edges = _hertz(np.linspace(0.0, float(_mels(np.array(RATE / 2))), MELS + 2))
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    slopes = edges[None, :] - bins[:, None]
    widths = np.diff(edges)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))).astype(np.float32)


def _mels(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = hertz * 3 / 200
    return np.where(hertz >= 1000, 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / np.log(6.4), linear)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels >= 15, 1000 * np.exp(np.log(6.4) / 27 * (mels - 15)), mels * 200 / 3)


def log_mel(wave: Wave) -> NDArray[np.float32]:
    """Whisper's levels of (frames, MELS), for sounds of less than 30 seconds."""
    count = -(-len(wave) // HOP)
    padded = np.concatenate([np.pad(wave, (WINDOW // 2, 0), "reflect"), np.zeros(WINDOW + HOP, np.float32)])
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: count * HOP : HOP]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
    power = np.abs(np.fft.rfft(frames * window, axis=1)).astype(np.float32) ** 2
    levels = np.log10(np.maximum(power @ _filters(), 1e-10))
    return (np.maximum(levels, levels.max() - 8.0) + 4.0) / 4.0


def sound(wave: Wave) -> Sound:
    return Sound(as_bytes(log_mel(wave)))


def as_bytes(levels: NDArray[np.float32]) -> Bytes:
    """Levels from -2 to 2 in steps of 1/64."""
    return np.clip(np.round((levels + 2) * 64), 0, 255).astype(np.uint8)


def chunks(heard: Sound) -> list[Bytes]:
    return [heard.frames[at : at + CHUNK] for at in range(0, len(heard.frames), CHUNK)]
