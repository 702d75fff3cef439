"""Batches from the shards that workers write, kept on the device.

Each shard is moved there once. A step takes a batch that has not been used yet or, if the workers are behind, repeats
one: the device never waits for them, except for the first.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.omni.features import CHUNK, MAX_CELLS
from training.omni.network import Media
from training.omni.shards import Arrays

Batch = tuple[Tensor, Tensor | None, Media | None]
"""Marked tokens, positions (None: one after the other) and media."""


def text_batches(path: Path, rows: int, device: torch.device) -> list[Batch]:
    found = torch.from_numpy(np.load(path).astype(np.int32)).to(device)
    return [(part, None, None) for part in found.split(rows) if len(part) == rows]


def media_batches(path: Path, rows: int, device: torch.device) -> list[Batch]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    count = len(arrays["rows"]) // rows
    return [media_batch(arrays, range(at * rows, (at + 1) * rows), device) for at in range(count)]


def media_batch(arrays: Arrays, rows: range, device: torch.device) -> Batch:
    """The rows with the media that they use."""
    chosen = slice(rows.start, rows.stop)
    length = arrays["rows"].shape[1]
    pictures, picture_from, picture_to = _uses(arrays["picture_uses"], rows, length, MAX_CELLS, _cells(arrays))
    chunks, sound_from, sound_to = _uses(arrays["chunk_uses"], rows, length, CHUNK // 4, _embeddings(arrays))

    def moved(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    media = Media(
        moved(arrays["patches"][pictures]),
        moved(arrays["grids"][pictures]),
        moved(arrays["chunks"][chunks]),
        moved(arrays["frames"][chunks]),
        moved(picture_from),
        moved(picture_to),
        moved(sound_from),
        moved(sound_to),
    )
    positions = moved(arrays["positions"][chosen].transpose(1, 0, 2))
    return moved(arrays["rows"][chosen].astype(np.int32)), positions, media


def _cells(arrays: Arrays) -> NDArray[Any]:
    return arrays["grids"].prod(1) // 4


def _embeddings(arrays: Arrays) -> NDArray[Any]:
    return ((arrays["frames"] - 1) // 2 + 1) // 2


def _uses(
    uses: NDArray[Any], rows: range, length: int, stride: int, lengths: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The numbers of the media used in the rows, and from where to where their embeddings go."""
    mine = uses[(uses[:, 0] >= rows.start) & (uses[:, 0] < rows.stop)]
    numbers, local = np.unique(mine[:, 2], return_inverse=True)
    if not len(mine):
        return numbers, np.zeros(0, np.int64), np.zeros(0, np.int64)
    counts = lengths[mine[:, 2]]
    within = np.concatenate([np.arange(count) for count in counts])
    start_from = np.repeat(local * stride, counts)
    start_to = np.repeat((mine[:, 0] - rows.start).astype(np.int64) * length + mine[:, 1], counts)
    return numbers, (start_from + within).astype(np.int64), start_to + within


class Pool:
    """Batches of one kind; a thread loads shards as they appear and deletes their files."""

    def __init__(self, folder: Path, pattern: str, load: Callable[[Path], list[Batch]], most_bytes: float) -> None:
        self._folder, self._pattern, self._load = folder, pattern, load
        self._most_bytes, self._bytes = most_bytes, 0
        self._fresh: deque[Batch] = deque()
        self._used: deque[Batch] = deque()
        self._random, self._lock = Random(1), threading.Lock()
        self.fresh_count = self.repeated_count = 0
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                for path in sorted(self._folder.glob(self._pattern)):
                    batches = self._load(path)
                    path.unlink()
                    with self._lock:
                        self._fresh.extend(batches)
                        self._bytes += sum(_bytes_of(batch) for batch in batches)
                        while self._bytes > self._most_bytes and self._used:
                            self._bytes -= _bytes_of(self._used.popleft())
                self._ended.wait(0.05)
        except Exception as error:
            self._failure = error

    def next(self, writers: list[subprocess.Popen[bytes]]) -> Batch:
        while True:
            if self._failure:
                raise self._failure
            with self._lock:
                if self._fresh:
                    self.fresh_count += 1
                    self._used.append(self._fresh.popleft())
                    return self._used[-1]
                if self._used:
                    self.repeated_count += 1
                    return self._used[self._random.randrange(len(self._used))]
            if any(writer.poll() is not None for writer in writers):
                raise RuntimeError("a worker ended before it wrote a shard")
            time.sleep(0.05)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)


def _bytes_of(batch: Batch) -> int:
    tokens, positions, media = batch
    found = tokens.nbytes + (positions.nbytes if positions is not None else 0)
    return found + (media.patches.nbytes + media.chunks.nbytes if media else 0)
