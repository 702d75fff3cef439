"""Rows of tokens with their pictures and sounds. The text of shard k depends on the seed and k alone; its pictures also
on the fonts at hand, and its sounds on what espeak-ng said before.

A shard is a dictionary of arrays. `rows` and `positions` have the tokens and their places; media are stored once each,
and every use of one names its row, its place there and its number.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.omni import features, tokens
from training.omni.features import CHUNK, MAX_PATCHES, MELS, PATCH_PIXELS, Medium, Picture
from training.omni.questions import MediaSample, media_samples
from training.phrasings import Draw, Split
from training.rendering import render
from training.shards import LEARNED, STARTS, TOKEN, Row
from training.tokenizer import pieces

OPEN_ROWS = 6
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Document:
    """A sample as marked tokens, with the place of each token and the media in it."""

    row: Row
    positions: NDArray[np.int16]
    media: tuple[Medium, ...]


def document(tokenizer: Tokenizer, shown: MediaSample) -> Document:
    texts = render(shown.sample)
    prompt, reply = (np.asarray(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    prompt = tokens.expand(prompt, [medium.length for medium in shown.media])
    ids = np.concatenate([prompt, reply])
    grids = [medium.grid for medium in shown.media if isinstance(medium, Picture)]
    row = np.concatenate([prompt, reply | LEARNED])
    row[0] |= STARTS
    return Document(row, tokens.positions(ids, grids), shown.media)


def packed(documents: Iterator[Document], length: int, count: int) -> list[list[Document]]:
    """`count` rows of documents, each in the first of a few open rows that has room for it."""
    done: list[list[Document]] = []
    open_rows: list[list[Document]] = []
    room: list[int] = []
    while len(done) < count:
        found = next(documents)
        if len(found.row) > length:
            continue
        at = next((at for at, left in enumerate(room) if left >= len(found.row)), len(room))
        if at == len(room):
            open_rows.append([])
            room.append(length)
        open_rows[at].append(found)
        room[at] -= len(found.row)
        if len(room) > OPEN_ROWS or min(room) < 40:
            fullest = room.index(min(room))
            done.append(open_rows.pop(fullest))
            room.pop(fullest)
    return done


def arrays(rows: list[list[Document]], length: int) -> Arrays:
    filled, places = np.zeros((len(rows), length), np.uint16), np.zeros((len(rows), 3, length), np.int16)
    store = _Store()
    for number, documents in enumerate(rows):
        at = 0
        for found in documents:
            end = at + len(found.row)
            filled[number, at:end], places[number, :, at:end] = found.row, found.positions
            store.add(found, number, at)
            at = end
        if at < length:
            filled[number, at] = STARTS
    return {"rows": filled, "positions": places, **store.arrays()}


class _Store:
    """Media, each kept once, and their uses: (row, first token, number)."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Medium] = []
        self._pictures: list[Picture] = []
        self._chunks: list[NDArray[np.uint8]] = []
        self._uses: dict[str, list[tuple[int, int, int]]] = {"picture_uses": [], "chunk_uses": []}

    def add(self, found: Document, row: int, start: int) -> None:
        ids = found.row & TOKEN
        places = np.flatnonzero((ids == tokens.IDS[tokens.IMAGE]) | (ids == tokens.IDS[tokens.AUDIO]))
        at = 0
        for medium in found.media:
            first = start + int(places[at])
            if isinstance(medium, Picture):
                self._uses["picture_uses"].append((row, first, self._number(medium)))
            else:
                number = self._number(medium)
                for offset in range(-(-len(medium.frames) // CHUNK)):
                    self._uses["chunk_uses"].append((row, first + offset * CHUNK // 4, number + offset))
            at += medium.length

    def _number(self, medium: Medium) -> int:
        if id(medium) not in self._numbers:
            self._kept.append(medium)
            self._numbers[id(medium)] = len(self._pictures) if isinstance(medium, Picture) else len(self._chunks)
            if isinstance(medium, Picture):
                self._pictures.append(medium)
            else:
                self._chunks.extend(features.chunks(medium))
        return self._numbers[id(medium)]

    def arrays(self) -> Arrays:
        patches = np.zeros((len(self._pictures), MAX_PATCHES, PATCH_PIXELS), np.uint8)
        grids = np.zeros((len(self._pictures), 2), np.int32)
        for at, picture in enumerate(self._pictures):
            patches[at, : len(picture.patches)] = picture.patches
            grids[at] = picture.rows, picture.columns
        chunks = np.zeros((len(self._chunks), CHUNK, MELS), np.uint8)
        frames = np.array([len(chunk) for chunk in self._chunks], np.int32)
        for at, chunk in enumerate(self._chunks):
            chunks[at, : len(chunk)] = chunk
        uses = {name: np.array(found, np.int32).reshape(-1, 3) for name, found in self._uses.items()}
        return {"patches": patches, "grids": grids, "chunks": chunks, "frames": frames, **uses}


def shard(seed: int, number: int, length: int, tokenizer: Tokenizer, rows: int) -> Arrays:
    return arrays(packed(_documents(seed, number, tokenizer), length, rows), length)


def _documents(seed: int, number: int, tokenizer: Tokenizer) -> Iterator[Document]:
    draw = Draw(Random(f"omni/{seed}/{number}"), Split.TRAIN, pieces(tokenizer))
    while True:
        for shown in media_samples(draw):
            yield document(tokenizer, shown)


def write(path: Path, found: Arrays) -> None:
    """The file appears under its name only when it is complete."""
    part = path.with_suffix(f".part{os.getpid()}")
    with part.open("wb") as file:
        np.savez(file, **found)  # type: ignore[arg-type]
    part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write shards FIRST, FIRST + STEP, ... until the process is ended.")
    for name in ("seed", "length", "rows", "first", "step"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    tokenizer, number = tokens.make(), given.first
    while True:
        path = given.folder / f"media-{number:06}.npz"
        write(path, shard(given.seed, number, given.length, tokenizer, given.rows))
        number += given.step


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(10)  # the trainer compiles its kernels meanwhile
    main()
