"""Rows of tokens to train on. Shard k is a pure function of (seed, k) and the tokenizer; workers write them as files.

A row holds whole conversations, one after the other. Each 16-bit entry is a token with two marks: here a conversation
starts, and this token is to be learned.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.conversations import Piece, Sample
from training.mixture import samples
from training.phrasings import Split
from training.rendering import END, render
from training.tokenizer import load, pieces

TOKEN, STARTS, LEARNED = np.uint16(0x3FFF), np.uint16(0x4000), np.uint16(0x8000)
ROWS_PER_SHARD = 256
OPEN_ROWS = 8
BATCH = 512

Row = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a shard depends on, besides its number."""

    seed: int
    length: int
    folder: Path
    tokenizer: Path
    polish: bool = False
    """Whether the shards are of the second stage."""

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05}.npy"


def encoded(tokenizer: Tokenizer, batch: list[Sample]) -> list[Row]:
    """Prompt and reply of each sample as marked tokens."""
    pieces = [_pieces(sample) for sample in batch]
    texts = [piece.text for part in pieces for piece in part]
    ids = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    return [_marked(part, [np.asarray(next(ids).ids, np.uint16) for _ in part]) for part in pieces]


def _pieces(sample: Sample) -> list[Piece]:
    """The prompt, then the reply in the pieces that are learned and those that are not."""
    prompt, reply = render(sample)
    if not sample.pieces:
        return [Piece(prompt, False), Piece(reply, True)]
    thought = reply.removesuffix(sample.messages[-1].content + END)
    return [Piece(prompt, False), Piece(thought, True), *sample.pieces, Piece(END, True)]


def _marked(pieces: list[Piece], ids: list[Row]) -> Row:
    row = np.concatenate([part | LEARNED if piece.learned else part for piece, part in zip(pieces, ids, strict=True)])
    row[0] |= STARTS
    return row


def packed(documents: Iterator[Row], length: int, count: int) -> Row:
    """`count` full rows, each document in the first of a few open rows that has room for it."""
    done: list[Row] = []
    open_rows: list[list[Row]] = []
    room: list[int] = []
    while len(done) < count:
        document = next(documents)
        if len(document) > length:
            continue
        at = next((at for at, left in enumerate(room) if left >= len(document)), len(room))
        if at == len(room):
            open_rows.append([])
            room.append(length)
        open_rows[at].append(document)
        room[at] -= len(document)
        if len(room) > OPEN_ROWS or min(room) < 32:
            fullest = room.index(min(room))
            done.append(_filled(open_rows.pop(fullest), room.pop(fullest)))
    return np.stack(done)


def _filled(documents: list[Row], room: int) -> Row:
    padding = np.zeros(room, np.uint16)
    padding[:1] = STARTS
    return np.concatenate([*documents, padding])


def shard(plan: Plan, number: int, tokenizer: Tokenizer, spelt: tuple[str, ...]) -> Row:
    return packed(_documents(plan, number, tokenizer, spelt), plan.length, ROWS_PER_SHARD)


def _documents(plan: Plan, number: int, tokenizer: Tokenizer, spelt: tuple[str, ...]) -> Iterator[Row]:
    stream = samples(plan.seed, number, Split.TRAIN, spelt, plan.polish)
    while True:
        yield from encoded(tokenizer, list(islice(stream, BATCH)))


def write(plan: Plan, numbers: range) -> None:
    """Makes the shards that are missing, in order; each appears under its name only when it is complete."""
    tokenizer = load(plan.tokenizer)
    spelt = pieces(tokenizer)
    for number in numbers:
        path = plan.path(number)
        if not path.exists():
            part = path.with_suffix(f".part{os.getpid()}.npy")
            np.save(part, shard(plan, number, tokenizer, spelt))
            part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write shards FIRST, FIRST + STEP, ... below END.")
    for name in ("seed", "length", "first", "end", "step"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--polish", action="store_true")
    given = parser.parse_args()
    plan = Plan(given.seed, given.length, given.folder, given.tokenizer, given.polish)
    write(plan, range(given.first, given.end, given.step))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(10)  # the trainer compiles its kernels meanwhile
    main()
