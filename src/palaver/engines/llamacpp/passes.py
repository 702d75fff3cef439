"""How the tokens of a step are divided into passes of llama.cpp.

A token's bits depend on the kernels that compute it. Two numbers of rows choose them: those of the whole pass, for
products with weights, and those of the token's own sequence, for attention. With flash attention off, one row alone
is computed by other kernels than several, and for some types of weights only whole groups of four rows by the quickest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from palaver.engines.base import BY_BATCH, BY_CACHE
from palaver.engines.llamacpp.context import LONE_BATCH, MAX_BATCH, ROW_GROUP, Context, Floats

MAX_REPLAYED = 1024
"""Reply tokens that are computed again as they were generated. That takes as long as it took then, longer than in
chunks."""
FLASH_TILE = 64
"""Rows of a sequence from which on flash attention computes them together, several times as fast."""
TILED_FROM, TILED_FROM_ROWS = 512, 40
"""The position and the number of rows from which on rows that fill up a tile cost less than they gain."""
_NO_ROWS = np.empty((0, 0), np.float32)


class Chunk(NamedTuple):
    """Tokens that follow each other in a sequence of the context."""

    sequence: int
    start: int
    """The position of the first token."""
    ids: Sequence[int]
    generated: bool = False
    """Whether the last token is the latest of a reply, or computed again as if it were. Also the last one of a prompt,
    if passes for prompts don't include it (`prefills_last_token`)."""


class Passes(Protocol):
    @property
    def padding(self) -> int:
        """Cells that a sequence needs beyond its tokens."""
        ...

    @property
    def max_chunk(self) -> int | None:
        """The most prompt tokens of a sequence that a step may compute; None: the scheduler's own limit."""
        ...

    @property
    def prefills_last_token(self) -> bool: ...

    @property
    def max_replayed(self) -> int:
        """As in `Runner`."""
        ...

    def run(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        """A row of logits for each chunk, after its last token; no rows without `need_logits`."""
        ...


class SharedPasses:
    """All chunks of a step in one pass, or as few as their tokens need."""

    padding = 0
    max_chunk = None
    prefills_last_token = True

    def __init__(self, context: Context, max_replayed: int = 0, pads: bool = False) -> None:
        """`pads`: fill up chunks over a long text to FLASH_TILE rows. The context must be able to truncate its
        sequences, and must not share cells between them."""
        self._context = context
        self._pads = pads
        self.max_replayed = max_replayed

    def run(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        ordered = sorted(range(len(chunks)), key=lambda index: chunks[index].sequence)  # neighbours share attention
        rows: list[Floats] = []
        for batch, finished in _split_batches([chunks[index] for index in ordered]):
            alone = self._pads and len(batch) == 1
            decode = _decode_tile if alone else Context.decode
            logits = decode(self._context, batch, need_logits and bool(finished))
            rows.extend(logits[index : index + 1] for index in finished if need_logits)
        return np.concatenate(rows)[np.argsort(ordered)] if rows else _NO_ROWS


def run_rows(context: Context, chunks: Sequence[Chunk], logits: Floats) -> None:
    """Writes a row of logits for each token of the chunks, in their order. The tokens are few."""
    if not context.settings.separate:
        context.decode_rows([chunk[:3] for chunk in chunks], logits)
        return
    row = 0
    for chunk in chunks:
        context.decode_rows([chunk[:3]], logits[row : row + len(chunk.ids)])
        row += len(chunk.ids)


class LonePasses:
    """A pass for each chunk. A prompt is divided by its length alone.

    So a token's bits depend on the text and its cached part alone, although kernels differ by the number of rows. Takes
    longer than a shared pass where that reads large weights once for all replies.
    """

    padding = 0
    max_chunk = LONE_BATCH
    prefills_last_token = False
    max_replayed = MAX_REPLAYED

    def __init__(self, context: Context, pads: bool = True) -> None:
        """`pads`: as for `SharedPasses`."""
        assert not context.settings.unified
        self._context = context
        self._decode = _decode_tile if pads else Context.decode

    def run(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        rows = [self._run_chunk(chunk, need_logits) for chunk in chunks]
        return np.concatenate(rows) if need_logits else _NO_ROWS

    def _run_chunk(self, chunk: Chunk, need_logits: bool) -> Floats:
        if chunk.generated and len(chunk.ids) > 1:
            self._decode(self._context, [_without_last(chunk)[:3]], need_logits=False)
            chunk = _last(chunk)
        return self._decode(self._context, [chunk[:3]], need_logits)


class SteadyPasses:
    """Passes in which no token's bits depend on other sequences, as far as the kernels allow (`probe_company`).

    Prompts are computed one after the other, in whole groups of rows. The latest tokens of all replies are computed
    together, one row each; beside a single one, a token that is removed again, if `pairs`.
    """

    padding = 0
    max_chunk = None
    prefills_last_token = True
    max_replayed = MAX_REPLAYED

    def __init__(self, context: Context, pairs: bool = False) -> None:
        """The context must be able to truncate its sequences, and must not share cells between them. `pairs`: for
        weights whose kernels round one row differently from any larger number."""
        self._context = context
        self._pairs = pairs and context.settings.sequences > 1
        self._prompts = GroupedPasses(context, ROW_GROUP, together=False)

    def run(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        rows: dict[int, Floats] = {}
        prompts = [chunk if not chunk.generated else _without_last(chunk) for chunk in chunks]
        self._prompts.add_rows([chunk for chunk in prompts if chunk.ids], need_logits, rows)
        generated = sorted(_last(chunk) for chunk in chunks if chunk.generated)  # neighbours share attention
        if generated:
            _collect(rows, generated, self._run_generated(generated, need_logits))
        return np.stack([rows[chunk.sequence] for chunk in chunks]) if need_logits else _NO_ROWS

    def _run_generated(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        pads = self._pairs_of({chunk.sequence for chunk in chunks}) if self._pairs else []
        batch = sorted([*chunks, *pads])  # llama.cpp computes neighbours together, and others in passes of their own
        logits = self._context.decode([chunk[:3] for chunk in batch], need_logits)  # of pads too: they are rows there
        for sequence, end, _, _ in pads:
            self._context.truncate(sequence, end)
        return logits[[row for row, chunk in enumerate(batch) if chunk not in pads]] if pads and need_logits else logits

    def _pairs_of(self, sequences: set[int]) -> list[Chunk]:
        """A token in a neighbour of each sequence that has none in the pass. Without room for it, the bits are what
        they are."""
        pads: dict[int, Chunk] = {}
        for sequence in sorted(sequences):
            near = [n for n in (sequence + 1, sequence - 1) if 0 <= n < self._context.settings.sequences]
            if not any(n in sequences or n in pads for n in near):
                ends = [(n, self._context.length(n)) for n in near]
                pads |= {n: Chunk(n, end, [0]) for n, end in ends[:1] if end < self._context.max_tokens}
        return list(pads.values())


class GroupedPasses:
    """Passes in which every sequence has whole groups of rows, also for the tokens of replies.

    A group is filled up with tokens that are removed again. If the kernels compute all groups alike (`probe_groups`),
    a token has the same bits whether it was generated or is part of a prompt.
    """

    max_chunk = None
    prefills_last_token = True
    max_replayed = 0

    def __init__(self, context: Context, group: int, together: bool = True) -> None:
        """As for `SteadyPasses`. `group`: 2 or ROW_GROUP. `together`: single tokens of several sequences share a pass,
        and each has a group of logits, too, of which one is used."""
        assert not context.settings.unified
        assert group in (2, ROW_GROUP)
        self._context = context
        self._group = group
        self._output_group = group if together else 1
        self._together = MAX_BATCH // group if together else 1
        self.padding = group - 1

    def run(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        rows: dict[int, Floats] = {}
        self.add_rows(chunks, need_logits, rows)
        return np.stack([rows[chunk.sequence] for chunk in chunks]) if need_logits else _NO_ROWS

    def add_rows(self, chunks: Sequence[Chunk], need_logits: bool, rows: dict[int, Floats]) -> None:
        """Computes single tokens, then longer chunks one after the other. Adds their logits to `rows`, by sequence."""
        single = sorted(chunk for chunk in chunks if len(chunk.ids) == 1)  # neighbours share attention
        for place in range(0, len(single), self._together):
            part = single[place : place + self._together]
            _collect(rows, part, self._run_padded(part, need_logits))
        for chunk in chunks:
            if len(chunk.ids) > 1:
                _collect(rows, [chunk], self._run_chunk(chunk, need_logits))

    def _run_chunk(self, chunk: Chunk, need_logits: bool) -> Floats:
        sequence, start, ids, _ = chunk
        last = (len(ids) - 1) // MAX_BATCH * MAX_BATCH
        for place in range(0, last, MAX_BATCH):
            self._context.decode([(sequence, start + place, ids[place : place + MAX_BATCH])], need_logits=False)
        return self._run_padded([Chunk(sequence, start + last, ids[last:])], need_logits)

    def _run_padded(self, chunks: Sequence[Chunk], need_logits: bool) -> Floats:
        """The last cells of a context may have no room for padding; their bits then are what they are."""
        pads = []
        for sequence, start, ids, _ in chunks:
            end = start + len(ids)
            missing = min(-len(ids) % self._group, self._context.max_tokens - end)
            pads += [(sequence, end, [ids[-1]] * missing)] if missing else []
        batch = [*(chunk[:3] for chunk in chunks), *pads]
        logits = self._context.decode(batch, need_logits, outputs=len(chunks), output_group=self._output_group)
        for sequence, end, _ in pads:
            self._context.truncate(sequence, end)
        return logits


def _decode_tile(context: Context, batch: Sequence[tuple[int, int, Sequence[int]]], need_logits: bool) -> Floats:
    """Computes one chunk. Over a long text it is filled up to FLASH_TILE rows, if it has nearly as many."""
    sequence, start, ids = batch[0]
    end, full = start + len(ids), start + FLASH_TILE
    long = start >= TILED_FROM and TILED_FROM_ROWS <= len(ids) < FLASH_TILE
    if not long or full > context.max_tokens:
        return context.decode(batch, need_logits)
    logits = context.decode([*batch, (sequence, end, [0] * (full - end))], need_logits, outputs=1)
    context.truncate(sequence, end)
    return logits


def _collect(rows: dict[int, Floats], chunks: Sequence[Chunk], logits: Floats) -> None:
    rows.update(zip((chunk.sequence for chunk in chunks), logits, strict=False))


def _without_last(chunk: Chunk) -> Chunk:
    return chunk._replace(ids=chunk.ids[:-1], generated=False)


def _last(chunk: Chunk) -> Chunk:
    return chunk._replace(start=chunk.start + len(chunk.ids) - 1, ids=chunk.ids[-1:])


def _split_batches(chunks: Sequence[Chunk]) -> list[tuple[list[tuple[int, int, Sequence[int]]], list[int]]]:
    """Batches of at most MAX_BATCH tokens, and the indexes of the pieces that end a chunk, in the chunks' order."""
    batches: list[tuple[list[tuple[int, int, Sequence[int]]], list[int]]] = []
    batch: list[tuple[int, int, Sequence[int]]] = []
    finished: list[int] = []
    room = MAX_BATCH
    for number, start, ids, _ in chunks:
        taken = 0
        while taken < len(ids):
            if not room:
                batches.append((batch, finished))
                batch, finished, room = [], [], MAX_BATCH
            piece = ids[taken : taken + room]
            batch.append((number, start + taken, piece))
            taken += len(piece)
            room -= len(piece)
        finished.append(len(batch) - 1)
    return [*batches, (batch, finished)]


def probe_groups(context: Context, group: int) -> bool:
    """Whether `GroupedPasses` gives the same bits for a text in any pieces, alone and beside others.

    Uses all sequences, which must be empty, and empties them.
    """
    passes, ids = GroupedPasses(context, group), _probe_ids(context, 40)
    others = range(1, context.settings.sequences)
    whole = passes.run([Chunk(0, 0, ids)], need_logits=True)
    try:
        for pieces, count in ((5, 20, *[1] * 15), 0), ((2, 13, *[1] * 25), len(others)), ((38, 1, 1), 1):
            for number in range(context.settings.sequences):
                context.truncate(number, 0)
            start = 0
            for place, size in enumerate(pieces):
                company = [Chunk(number, place, [ids[number % 40]]) for number in others[:count]]
                logits = passes.run([Chunk(0, start, ids[start : start + size]), *company], need_logits=True)
                start += size
            if not np.array_equal(logits[:1], whole):
                return False
        return True
    finally:
        _clear(context)


def probe_company(context: Context, passes: SteadyPasses) -> str:
    """Whether a generated token has the same bits alone and beside others: BY_CACHE or BY_BATCH.

    Few tokens, because every start of a model waits for it. Uses all sequences, which must be empty, and empties them.
    """
    others = range(1, context.settings.sequences)
    ids = _probe_ids(context, 40)
    rows: list[Floats] = []
    try:
        context.decode([(0, 0, ids[:8])], need_logits=False)
        for count in sorted({0, min(1, len(others)), len(others)}):
            company = [Chunk(number, 0, [ids[number % 40]], generated=True) for number in others[:count]]
            rows.append(passes.run([Chunk(0, 8, ids[8:9], generated=True), *company], need_logits=True))
            for number in range(count + 1):
                context.truncate(number, 0 if number else 8)
        alone = [passes.run([Chunk(n, 0, [ids[n % 40]], generated=True)], need_logits=True) for n in others[-1:]]
        return BY_CACHE if _is_same(rows, alone) else BY_BATCH
    finally:
        _clear(context)


def _is_same(rows: Sequence[Floats], last_alone: Sequence[Floats]) -> bool:
    """Whether the first row of all passes is the same, and the last row of the last pass is what it is alone."""
    first = all(np.array_equal(row[0], rows[0][0]) for row in rows)
    return first and all(np.array_equal(rows[-1][-1], alone[0]) for alone in last_alone)


def _probe_ids(context: Context, count: int) -> list[int]:
    return [token % context.vocabulary_size for token in range(3, 3 + 7 * count, 7)]


def _clear(context: Context) -> None:
    for number in range(context.settings.sequences):
        context.truncate(number, 0)
