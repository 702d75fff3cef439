"""One forward pass: the next tokens of all its sequences as rows, and the spans that attention is computed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from palaver.engines.core.kv_cache import Slot, SlotPool
from palaver.engines.torch.attention import (
    AttentionSpan,
    BatchDecodeSpan,
    BlockSpan,
    MaskRule,
    PaddingSpan,
    PrefillSpan,
    SingleDecodeSpan,
    TokenBlocks,
)
from palaver.engines.torch.attention_functions import AttentionParams


class BatchInputs:
    """The token, the position and the rotary position of each row, in tensors that stay the same from one decode pass
    to the next. Rotary positions differ after media whose tokens take up more or fewer of them."""

    def __init__(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        device: torch.device,
        rotary_positions: Sequence[int] | None = None,
    ) -> None:
        self._tensor = torch.tensor([ids, positions, rotary_positions or positions], device=device)
        self.ids, self.positions, self.rotary_positions = self._tensor
        self._array = self._tensor.numpy() if device.type == "cpu" else None
        """The same memory as an array: changing a few numbers in it takes a tenth of the time."""

    @property
    def stacked(self) -> Tensor:
        """The three of each row, one below the other."""
        return self._tensor

    def copy_from(self, other: BatchInputs) -> None:
        if other is not self:
            self._tensor.copy_(other._tensor)

    def advance(self, ids: Sequence[int] | Tensor) -> None:
        """Replaces each row's token by the next one, at the next position. `ids` on the device are not waited for."""
        if self._array is not None:
            self._array[0] = ids
            self._array[1:] += 1
        else:
            self.ids.copy_(ids if isinstance(ids, Tensor) else torch.tensor(ids))
            self._tensor[1:] += 1


@dataclass(slots=True, weakref_slot=True, eq=False)
class ForwardBatch:
    """The rows of one forward pass, grouped into attention spans.

    Holds references to the pools of its slots, which keep their memory allocated.
    """

    inputs: BatchInputs
    spans: tuple[AttentionSpan, ...]
    last_rows: Tensor
    """The row of each sequence's last token, in the order the sequences were given."""
    needs_gather: bool
    """Whether `last_rows` is anything else than all rows in order."""
    max_position: int
    chunks: list[SequenceChunk]
    """The sequences' chunks in the order of the rows."""
    order: tuple[int, ...]
    """The index of each chunk in the order given."""
    needs_logits: bool
    """False where only keys and values are computed."""
    last_tokens: ForwardBatch | None
    """In a prefill that needs logits: the last token of each sequence as a decode batch, for the last layer."""
    long_rope: bool
    """Whether the sequences use the frequencies for long texts (`LongRope`)."""
    has_drafts: bool = False
    """Whether each row has logits, and rows of one sequence follow each other."""
    first_row: int = 0
    """The row of the first chunk's first token: rows of padding may be in front."""

    @property
    def has_media(self) -> bool:
        """Whether a row may stand for media."""
        return any(chunk.media is not None for chunk in self.chunks)

    @property
    def ids(self) -> Tensor:
        return self.inputs.ids

    @property
    def positions(self) -> Tensor:
        return self.inputs.positions

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token of each sequence, with logits."""
        return self.needs_logits and self.last_tokens is None and not self.has_drafts

    def can_advance_to(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether these are the next single tokens of the same sequences in the same slots."""
        if len(chunks) != len(self.chunks):
            return False
        return all(before.precedes(chunks[i]) for before, i in zip(self.chunks, self.order, strict=True))

    def advance(self, chunks: Sequence[SequenceChunk], tokens: Tensor | None = None) -> None:
        """Becomes the batch of these chunks, which follow its own; cheaper than a new batch.

        `tokens`: on the device, in the order of the chunks, in place of their ids.
        """
        self.chunks = [chunks[i] for i in self.order]
        self.inputs.advance([chunk.ids[0] for chunk in self.chunks] if tokens is None else self._in_rows(tokens))
        self.max_position += 1
        for span in self.spans:
            span.advance()

    def set_tokens(self, tokens: Tensor) -> None:
        """Replaces the ids of all chunks, single tokens, by those on the device, in the order the chunks were given."""
        self.inputs.ids.copy_(self._in_rows(tokens))

    def _in_rows(self, tokens: Tensor) -> Tensor:
        return tokens[self.last_rows.argsort()] if self.needs_gather else tokens

    def padded_to(self, length: int) -> ForwardBatch:
        """The batch with attention over so many keys: the same operations for every decode pass up to that length."""
        return replace(self, spans=tuple(span.padded_to(length) for span in self.spans))

    @property
    def extra_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a pass reads besides the inputs and the memory of slots."""
        return (self.last_rows, *(tensor for span in self.spans for tensor in span.extra_tensors))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if len(self.spans) == 1:
            self.spans[0].write(layer, keys, values)
            return
        for span in self.spans:
            span.write(layer, keys[span.rows], values[span.rows])

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        if len(self.spans) == 1:
            return self.spans[0].attend(layer, queries, mask, params)
        return torch.cat([span.attend(layer, queries[span.rows], mask, params) for span in self.spans])


class ChunkMedia(Protocol):
    """The media of a sequence (`media.SequenceMedia`)."""

    @property
    def unsplit(self) -> Sequence[tuple[int, int]]: ...

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, Any, slice]]: ...

    def write_positions(self, start: int, positions: Tensor) -> None: ...

    def blocks(self, start: int, stop: int) -> TokenBlocks | None: ...


@dataclass(slots=True)
class SequenceChunk:
    """The next tokens of one sequence."""

    slot: Slot[Tensor]
    pool: SlotPool[Tensor]
    index: int
    """The slot's location when the chunk was made; the slot may move."""
    start: int
    ids: Sequence[int]
    long_rope: bool = False
    """Whether the sequence uses the frequencies for long texts (`LongRope`)."""
    media: ChunkMedia | None = None
    """The media of the sequence, unless these tokens come after all of them."""
    rotary_shift: int = 0
    """The rotary position of tokens after all media, less their position."""

    @property
    def last_token(self) -> SequenceChunk:
        return replace(self, start=self.start + len(self.ids) - 1, ids=self.ids[-1:])

    def precedes(self, other: SequenceChunk) -> bool:
        """Whether both are single tokens and `other` is the next one in the same slot."""
        same_slot = self.pool is other.pool and self.index == other.index
        same_media = self.media is other.media and self.rotary_shift == other.rotary_shift
        single = len(self.ids) == 1 == len(other.ids)
        return same_slot and same_media and single and self.start + 1 == other.start


def sequence_chunk(
    slot: Slot[Tensor],
    start: int,
    ids: Sequence[int],
    long_rope: bool = False,
    media: ChunkMedia | None = None,
    rotary_shift: int = 0,
) -> SequenceChunk:
    return SequenceChunk(slot, slot.pool, slot.index, start, ids, long_rope, media, rotary_shift)


def build_batch(chunks: Sequence[SequenceChunk], device: torch.device, need_logits: bool = True) -> ForwardBatch:
    prefills = need_logits and any(len(chunk.ids) > 1 for chunk in chunks)
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].ids) > 1, id(chunks[i].pool), chunks[i].index))
    ordered = [chunks[i] for i in order]
    inputs = BatchInputs(
        [token_id for chunk in ordered for token_id in chunk.ids],
        [chunk.start + i for chunk in ordered for i in range(len(chunk.ids))],
        device,
        [chunk.start + chunk.rotary_shift + i for chunk in ordered for i in range(len(chunk.ids))],
    )
    spans, row, last_rows = [], 0, [0] * len(chunks)
    for group in _group_by_pool(ordered):
        spans.append(_build_span(group, row, inputs.positions))
        row += sum(len(chunk.ids) for chunk in group)
    end = 0
    for i, chunk in zip(order, ordered, strict=True):
        end += len(chunk.ids)
        last_rows[i] = end - 1
    return ForwardBatch(
        inputs=inputs,
        spans=tuple(spans),
        last_rows=torch.tensor(last_rows, device=device),
        needs_gather=last_rows != list(range(end)),
        max_position=max(chunk.start + len(chunk.ids) + max(0, chunk.rotary_shift) for chunk in chunks) - 1,
        chunks=ordered,
        order=tuple(order),
        needs_logits=need_logits,
        last_tokens=build_batch([chunk.last_token for chunk in chunks], device) if prefills else None,
        long_rope=chunks[0].long_rope,
    )


def build_draft_batch(chunks: Sequence[SequenceChunk], device: torch.device) -> ForwardBatch:
    """A batch in which every token gets logits, in the order the chunks were given."""
    batch = build_batch(chunks, device, need_logits=False)
    ends = batch.last_rows.tolist()
    rows = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end + 1 - len(chunk.ids), end + 1)]
    return replace(
        batch,
        last_rows=torch.tensor(rows, device=device),
        needs_gather=rows != list(range(len(rows))),
        needs_logits=True,
        has_drafts=True,
    )


def _group_by_pool(chunks: Sequence[SequenceChunk]) -> list[list[SequenceChunk]]:
    """Single tokens of one pool share a span, unless more than half of the slots in between have no token."""
    groups: list[list[SequenceChunk]] = []
    for chunk in chunks:
        group = groups[-1] if groups else []
        single = len(chunk.ids) == 1 and group and len(group[0].ids) == 1
        if single and group[0].pool is chunk.pool and _is_dense([*group, chunk]):
            group.append(chunk)
        else:
            groups.append([chunk])
    return groups


def _is_dense(group: Sequence[SequenceChunk]) -> bool:
    return group[-1].index - group[0].index + 1 <= 2 * len(group)


def _build_span(group: Sequence[SequenceChunk], row: int, positions: Tensor) -> AttentionSpan:
    first = group[0]
    if len(first.ids) > 1:
        return _prefill_span(first, row, positions)
    if len(group) == 1:
        return _single_decode_span(first, row, positions)
    starts = [chunk.start for chunk in group]
    num_slots = group[-1].index - first.index + 1
    slot_offsets = [chunk.index - first.index for chunk in group]
    dense = num_slots == len(group)
    rows = slice(row, row + len(group))
    queries = positions[rows] if dense else _scatter_starts(starts, slot_offsets, num_slots, positions.device)
    return BatchDecodeSpan(
        rows=rows,
        length=max(starts) + 1,
        sees_all=dense and min(starts) == max(starts),
        query_positions=queries[:, None, None, None],
        pool=first.pool,
        first_slot=first.index,
        num_slots=num_slots,
        slot_offsets=torch.tensor(slot_offsets, device=positions.device),
        positions=positions[rows],
        dense=dense,
    )


def _scatter_starts(starts: Sequence[int], slot_offsets: Sequence[int], num_slots: int, device: torch.device) -> Tensor:
    """A position for each slot; slots without a row see their first key."""
    scattered = [0] * num_slots
    for offset, start in zip(slot_offsets, starts, strict=True):
        scattered[offset] = start
    return torch.tensor(scattered, device=device)


def _single_decode_span(chunk: SequenceChunk, row: int, positions: Tensor) -> SingleDecodeSpan:
    rows = slice(row, row + 1)
    return SingleDecodeSpan(
        rows=rows,
        length=chunk.start + 1,
        sees_all=True,
        query_positions=positions[rows][:, None, None, None],
        pool=chunk.pool,
        index=chunk.index,
    )


def _prefill_span(chunk: SequenceChunk, row: int, positions: Tensor) -> PrefillSpan:
    rows = slice(row, row + len(chunk.ids))
    return PrefillSpan(
        rows=rows,
        length=chunk.start + len(chunk.ids),
        sees_all=False,
        query_positions=positions[rows][None, None, :, None],
        slot=chunk.slot,
        start=chunk.start,
        media_blocks=None if chunk.media is None else chunk.media.blocks(chunk.start, chunk.start + len(chunk.ids)),
    )


def build_block_batch(
    chunks: Sequence[SequenceChunk], rows: int, padding_before: int, device: torch.device, need_logits: bool
) -> ForwardBatch:
    """A batch of exactly so many rows, for tokens of one aligned block of each sequence; every row gets logits.

    `padding_before`: rows of padding in front; the remaining padding is behind. Padding repeats the token next to it.
    """
    tokens = [(token_id, chunk.start + i, chunk) for chunk in chunks for i, token_id in enumerate(chunk.ids)]
    padding_after = rows - padding_before - len(tokens)
    tokens = [*tokens[:1] * padding_before, *tokens, *tokens[-1:] * padding_after]
    inputs = BatchInputs(
        [token_id for token_id, _, _ in tokens],
        [position for _, position, _ in tokens],
        device,
        [position + chunk.rotary_shift for _, position, chunk in tokens],
    )
    spans: list[AttentionSpan] = []
    if padding_before:
        spans.append(_padding_span(slice(0, padding_before), chunks[0], inputs.positions))
    row = padding_before
    for chunk in chunks:
        spans.append(_block_span(chunk, row, rows, device))
        row += len(chunk.ids)
    if padding_after:
        spans.append(_padding_span(slice(row, rows), chunks[0], inputs.positions))
    return ForwardBatch(
        inputs=inputs,
        spans=tuple(spans),
        last_rows=torch.arange(rows, device=device),
        needs_gather=False,
        max_position=max(chunk.start + len(chunk.ids) + max(0, chunk.rotary_shift) for chunk in chunks) - 1,
        chunks=list(chunks),
        order=tuple(range(len(chunks))),
        needs_logits=need_logits,
        last_tokens=None,
        long_rope=chunks[0].long_rope,
        first_row=padding_before,
    )


def _block_span(chunk: SequenceChunk, row: int, size: int, device: torch.device) -> BlockSpan:
    first = chunk.start - chunk.start % size
    return BlockSpan(
        rows=slice(row, row + len(chunk.ids)),
        length=first + size,
        sees_all=False,
        query_positions=torch.arange(first, first + size, device=device)[None, None, :, None],
        slot=chunk.slot,
        start=chunk.start,
        stop=chunk.start + len(chunk.ids),
        size=size,
    )


def _padding_span(rows: slice, chunk: SequenceChunk, positions: Tensor) -> PaddingSpan:
    values = chunk.pool.values
    return PaddingSpan(rows, 0, True, positions, value_size=lambda layer: values[layer].shape[-1])
