"""Attention over KV-cache slots: a span is the rows of a batch that one call attends for.

Prefill, decode, exact-mode blocks and padding are different spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from palaver.engines.core.kv_cache import Slot, SlotPool
from palaver.engines.torch.attention_functions import (
    AttentionParams,
    attend_decode,
    attend_flash,
    attend_in_workspace,
    attend_prefill,
    can_use_flash,
    can_use_workspace,
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query may see the key; broadcasts."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlocks:
    """Tokens that see each other, later ones too, as those of a picture do in some models."""

    numbers: Tensor
    """The block of each token; -1 for tokens that see earlier ones only."""
    in_all_layers: bool
    """True (Gemma 3): in every layer. False (Gemma 4): only in layers with a sliding window."""
    beyond_window: bool = False
    """Whether a token sees the earlier tokens of its block that its layer's window leaves out."""

    def hold(self, mask: MaskRule) -> bool:
        return self.in_all_layers or not mask.causal

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What a query sees of its block beyond the model's own rule."""
        blocks = self.numbers[queries]
        same = (blocks == self.numbers[keys]) & (blocks >= 0)
        return same if self.beyond_window else same & (keys > queries)


class MaskRule:
    """Which keys of its own sequence a query sees. Masks are built once for each span of a pass."""

    def __init__(self, mask_function: MaskFunction | None = None) -> None:
        self._mask_function = mask_function
        """None: causal attention without other limits."""
        self._masks: dict[tuple[AttentionSpan, int], Tensor | None] = {}
        self._triangles: dict[tuple[AttentionSpan, int], Tensor] = {}

    @property
    def causal(self) -> bool:
        return self._mask_function is None

    def mask(self, span: AttentionSpan, dtype: torch.dtype, repeats: int = 1) -> Tensor | None:
        """A mask to add to scores [sequences, heads, queries, keys]; None where every key is seen.

        `repeats`: the queries are repeated for so many heads, which share a key.
        """
        if (span, repeats) not in self._masks:
            mask = self._build(span, dtype)
            self._masks[span, repeats] = mask if mask is None or repeats == 1 else mask.repeat(1, 1, repeats, 1)
        return self._masks[span, repeats]

    def causal_triangle(self, span: PrefillSpan, dtype: torch.dtype, repeats: int) -> Tensor:
        """1 where a query of the chunk sees a token of the chunk, otherwise 0: [queries, tokens]."""
        if (span, repeats) not in self._triangles:
            count = span.length - span.start
            triangle = torch.ones((count, count), dtype=dtype, device=span.query_positions.device).tril_()
            self._triangles[span, repeats] = triangle.repeat(repeats, 1)
        return self._triangles[span, repeats]

    def _build(self, span: AttentionSpan, dtype: torch.dtype) -> Tensor | None:
        if self.causal and span.sees_all:
            return None
        queries = span.query_positions
        keys = torch.arange(span.length, device=queries.device)[None, None, None]
        visible = self._sees(queries, keys)
        if span.blocks is not None and span.blocks.hold(self):
            visible = visible | span.blocks.sees(queries, keys)
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)

    def _sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        visible = keys <= queries
        if self._mask_function is not None:
            zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=queries.device)
            visible = visible & self._mask_function(zero, zero, queries, keys)
        return visible

    def window(self, length: int, device: torch.device) -> int | None:
        """How many tokens a token of a text of this length sees, itself included; None where it sees all before it.
        Raises ValueError where that isn't a fixed number of the last ones."""
        if self.causal:
            return None
        keys = torch.arange(length, device=device)[None, None, None]
        ends = (length - 1, length - 2, length // 2)
        seen = [self._sees(torch.full((1, 1, 1, 1), end, device=device), keys).flatten() for end in ends]
        counts = [int(one.sum()) for one in seen]
        for end, one, count in zip(ends, seen, counts, strict=True):
            if count != min(counts[0], end + 1) or not bool(one[end + 1 - count : end + 1].all()):
                raise ValueError("its masks are no windows")
        return None if counts[0] == length else counts[0]

    def visible(self, length: int, device: torch.device) -> Tensor:
        """Which of so many tokens see which others by the model's own rule, later ones too: [tokens, tokens]."""
        places = torch.arange(length, device=device)
        queries, keys = places[None, None, :, None], places[None, None, None]
        if self._mask_function is None:
            return (keys <= queries)[0, 0]
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
        return self._mask_function(zero, zero, queries, keys).expand(1, 1, length, length)[0, 0]


@dataclass(eq=False, slots=True)
class AttentionSpan:
    """Rows that one call attends for."""

    rows: slice
    length: int
    """The number of keys attended to."""
    sees_all: bool
    """Whether causal attention lets each query see all of these keys."""
    query_positions: Tensor
    """[sequences, 1, queries, 1]."""

    @property
    def blocks(self) -> TokenBlocks | None:
        """The tokens of the sequence that see each other; None if there are none."""
        return None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores the rows' own keys and values, [rows, heads, size]."""
        raise NotImplementedError

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        """[rows, heads, size] to the same shape, of the values' size."""
        raise NotImplementedError

    def advance(self) -> None:
        """Moves on by one token, in place."""
        raise NotImplementedError

    def padded_to(self, length: int) -> AttentionSpan:
        """A span with masked keys up to this length: it serves every decode pass up to there, because only the
        positions tell how many keys are seen."""
        raise NotImplementedError

    @property
    def extra_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a pass reads besides the batch's inputs and the memory of slots."""
        return ()


@dataclass(eq=False, slots=True)
class PrefillSpan(AttentionSpan):
    """Several tokens of one sequence."""

    slot: Slot[Tensor]
    start: int
    media_blocks: TokenBlocks | None = None

    @property
    def blocks(self) -> TokenBlocks | None:
        return self.media_blocks

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        pool, index = self.slot.pool, self.slot.index
        pool.keys[layer][index, :, self.start : self.length] = keys.transpose(0, 1)
        pool.values[layer][index, :, self.start : self.length] = values.transpose(0, 1)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        pool, index = self.slot.pool, self.slot.index
        keys = pool.keys[layer][index : index + 1, :, : self.length]
        values = pool.values[layer][index : index + 1, :, : self.length]
        return self._attend(queries.transpose(0, 1), keys, values, mask, params).transpose(0, 1)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        """[heads, queries, size]."""
        repeats = queries.shape[0] // keys.shape[1]
        causal = mask.causal and (self.media_blocks is None or not self.media_blocks.hold(mask))
        if causal and can_use_flash(queries, values, params):
            return attend_flash(queries, keys, values, params)
        if causal and can_use_workspace(queries, keys, params):
            triangle = mask.causal_triangle(self, queries.dtype, repeats)
            out = attend_in_workspace(queries, keys, values, triangle, params)
            if out is not None:
                return out
        chunk_mask = mask.mask(self, queries.dtype, repeats)
        assert chunk_mask is not None, "the queries of a chunk have different positions"
        return attend_prefill(queries, keys, values, chunk_mask, params)


@dataclass(eq=False, slots=True)
class BlockSpan(AttentionSpan):
    """Tokens of one sequence within an aligned block of positions (`ExactPasses`). The call has the shape of the whole
    block, also if only some of its tokens are computed."""

    slot: Slot[Tensor]
    start: int
    stop: int
    size: int
    """Positions in a block; `length` is where the block ends."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        pool, index = self.slot.pool, self.slot.index
        pool.keys[layer][index, :, self.start : self.stop] = keys.transpose(0, 1)
        pool.values[layer][index, :, self.start : self.stop] = values.transpose(0, 1)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        pool, index = self.slot.pool, self.slot.index
        keys = pool.keys[layer][index : index + 1, :, : self.length]
        values = pool.values[layer][index : index + 1, :, : self.length]
        heads = queries.shape[1]
        first = self.length - self.size
        padded = queries.new_zeros((heads, self.size, queries.shape[2]))
        padded[:, self.start - first : self.stop - first] = queries.transpose(0, 1)
        block_mask = mask.mask(self, queries.dtype, heads // keys.shape[1])
        assert block_mask is not None, "the queries of a block have different positions"
        out = attend_prefill(padded, keys, values, block_mask, params)
        return out[:, self.start - first : self.stop - first].transpose(0, 1)


@dataclass(eq=False, slots=True)
class PaddingSpan(AttentionSpan):
    """Rows that belong to no sequence: they only give a pass its shape."""

    value_size: Callable[[int], int]
    """The size of a value, by layer; that of the output too."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        pass

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        return queries.new_zeros((*queries.shape[:2], self.value_size(layer)))


@dataclass(eq=False, slots=True)
class SingleDecodeSpan(AttentionSpan):
    """The next token of one sequence."""

    pool: SlotPool[Tensor]
    index: int

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.pool.keys[layer][self.index, :, self.length - 1] = keys[0]
        self.pool.values[layer][self.index, :, self.length - 1] = values[0]

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        keys = self.pool.keys[layer][self.index : self.index + 1, :, : self.length]
        values = self.pool.values[layer][self.index : self.index + 1, :, : self.length]
        return attend_decode(queries, keys, values, mask.mask(self, queries.dtype), params)

    def advance(self) -> None:
        """The positions are a view of the batch's, which were advanced already."""
        self.length += 1

    def padded_to(self, length: int) -> AttentionSpan:
        return BatchDecodeSpan(
            rows=self.rows,
            length=min(length, self.pool.capacity),
            sees_all=False,
            query_positions=self.query_positions,
            pool=self.pool,
            first_slot=self.index,
            num_slots=1,
            slot_offsets=torch.zeros(1, dtype=torch.long, device=self.query_positions.device),
            positions=self.query_positions.view(1),
            dense=True,
        )


@dataclass(eq=False, slots=True)
class BatchDecodeSpan(AttentionSpan):
    """The next token of several sequences in one pool, in the order of their slots."""

    pool: SlotPool[Tensor]
    first_slot: int
    num_slots: int
    """How many slots, from the first on, are attended to."""
    slot_offsets: Tensor
    """The slot of each row, counted from the first one."""
    positions: Tensor
    dense: bool
    """Whether each of those slots has a row."""
    _slot_range: slice = field(init=False)
    _flat_rows: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slot_range = slice(self.first_slot, self.first_slot + self.num_slots)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.pool.flat_keys[layer].index_put_((self._row_indices(keys.shape[1]),), keys)
        self.pool.flat_values[layer].index_put_((self._row_indices(values.shape[1]),), values)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, params: AttentionParams) -> Tensor:
        keys = self.pool.keys[layer][self._slot_range, :, : self.length]
        values = self.pool.values[layer][self._slot_range, :, : self.length]
        rows = queries if self.dense else self._scatter(queries)
        out = attend_decode(rows, keys, values, mask.mask(self, queries.dtype), params)
        return out if self.dense else out[self.slot_offsets]

    def advance(self) -> None:
        """The positions are a view of the batch's, which were advanced already."""
        self.length += 1
        if not self.dense:
            self.query_positions += 1
        for rows in self._flat_rows.values():
            rows += 1

    def padded_to(self, length: int) -> AttentionSpan:
        positions = self.positions
        if not self.dense:
            positions = positions.new_zeros(self.num_slots).index_put_((self.slot_offsets,), positions)
        return replace(
            self,
            length=min(length, self.pool.capacity),
            sees_all=False,
            query_positions=positions[:, None, None, None],
            _flat_rows={},
        )

    @property
    def extra_tensors(self) -> tuple[Tensor, ...]:
        return (self.slot_offsets,)

    def _row_indices(self, heads: int) -> Tensor:
        """Where each row's vectors go in the pool's flat keys or values, [rows, heads]."""
        if heads not in self._flat_rows:
            slots = self.slot_offsets + self.first_slot
            slot_heads = slots[:, None] * heads + torch.arange(heads, device=slots.device)
            self._flat_rows[heads] = slot_heads * self.pool.capacity + self.positions[:, None]
        return self._flat_rows[heads]

    def _scatter(self, queries: Tensor) -> Tensor:
        """A row for each slot; the output of slots without a query is dropped."""
        rows = queries.new_zeros((self.num_slots, *queries.shape[1:]))
        rows[self.slot_offsets] = queries
        return rows
