"""Attention over lanes: the rows of a pass that are attended for in one call, and what each of them may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from palaver.engines.torch.attention_kernels import (
    AttentionHead,
    attend_chunk,
    attend_flash,
    attend_in_workspace,
    attend_singles,
    suits_flash,
    suits_workspace,
)
from palaver.engines.torch.kv_cache import Slot, SlotPool

Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query may see the key; broadcasts."""


class MaskRule:
    """What a query may see of its own sequence. Masks are built once for each part of a pass."""

    def __init__(self, allowed: Allowed | None = None) -> None:
        self._allowed = allowed
        """None: everything up to itself."""
        self._masks: dict[tuple[AttentionSpan, int], Tensor | None] = {}
        self._among: dict[tuple[AttentionSpan, int], Tensor] = {}

    @property
    def causal(self) -> bool:
        return self._allowed is None

    def of(self, part: AttentionSpan, dtype: torch.dtype, times: int = 1) -> Tensor | None:
        """To be added to scores [sequences, heads, queries, keys]; None where every key is seen.

        `times`: for so many heads one after the other, each with all the queries.
        """
        if (part, times) not in self._masks:
            mask = self._build(part, dtype)
            self._masks[part, times] = mask if mask is None or times == 1 else mask.repeat(1, 1, times, 1)
        return self._masks[part, times]

    def among(self, chunk: PrefillSpan, dtype: torch.dtype, times: int) -> Tensor:
        """1 where a query sees a token of the chunk, otherwise 0, [queries, tokens]; order alone counts."""
        if (chunk, times) not in self._among:
            count = chunk.length - chunk.start
            seen = torch.ones((count, count), dtype=dtype, device=chunk.query_positions.device).tril_()
            self._among[chunk, times] = seen.repeat(times, 1)
        return self._among[chunk, times]

    def _build(self, part: AttentionSpan, dtype: torch.dtype) -> Tensor | None:
        if self.causal and part.even:
            return None
        queries = part.query_positions
        keys = torch.arange(part.length, device=queries.device)[None, None, None]
        seen = keys <= queries
        if self._allowed is not None:
            zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=queries.device)
            seen = seen & self._allowed(zero, zero, queries, keys)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


@dataclass(eq=False, slots=True)
class AttentionSpan:
    """Rows that are attended for in one call."""

    rows: slice
    length: int
    """The keys that are looked at."""
    even: bool
    """Whether each query sees all of them, where nothing but the order of tokens limits it."""
    query_positions: Tensor
    """[sequences, 1, queries, 1]."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores the rows' own keys and values, [rows, heads, size]."""
        raise NotImplementedError

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        """[rows, heads, size] to the same shape, of the values' size."""
        raise NotImplementedError

    def advance(self) -> None:
        """Moves on by one token, in place."""
        raise NotImplementedError

    def steady(self, length: int) -> AttentionSpan:
        """The same for every step in which no more keys than this are seen: only the positions tell how many."""
        raise NotImplementedError

    @property
    def own(self) -> tuple[Tensor, ...]:
        """What it holds beside the numbers of the plan and the memory of lanes."""
        return ()


@dataclass(eq=False, slots=True)
class PrefillSpan(AttentionSpan):
    """Several tokens of one sequence."""

    lane: Slot
    start: int

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        bank, index = self.lane.bank, self.lane.index
        bank.keys[layer][index, :, self.start : self.length] = keys.transpose(0, 1)
        bank.values[layer][index, :, self.start : self.length] = values.transpose(0, 1)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        bank, index = self.lane.bank, self.lane.index
        keys = bank.keys[layer][index : index + 1, :, : self.length]
        values = bank.values[layer][index : index + 1, :, : self.length]
        return self._attended(queries.transpose(0, 1), keys, values, mask, head).transpose(0, 1)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        """[heads, queries, size]."""
        times = queries.shape[0] // keys.shape[1]
        if mask.causal and suits_flash(queries, values, head):
            return attend_flash(queries, keys, values, head)
        if mask.causal and suits_workspace(queries, keys, head):
            out = attend_in_workspace(queries, keys, values, mask.among(self, queries.dtype, times), head)
            if out is not None:
                return out
        seen = mask.of(self, queries.dtype, times)
        assert seen is not None, "a chunk has a mask: its queries come one after the other"
        return attend_chunk(queries, keys, values, seen, head)


@dataclass(eq=False, slots=True)
class Block(AttentionSpan):
    """Tokens of one sequence within an aligned block of positions: attended for in a call of the whole block's shape,
    whichever of its tokens are computed."""

    lane: Slot
    start: int
    stop: int
    size: int
    """Positions in a block; `length` is where the block ends."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        bank, index = self.lane.bank, self.lane.index
        bank.keys[layer][index, :, self.start : self.stop] = keys.transpose(0, 1)
        bank.values[layer][index, :, self.start : self.stop] = values.transpose(0, 1)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        bank, index = self.lane.bank, self.lane.index
        keys = bank.keys[layer][index : index + 1, :, : self.length]
        values = bank.values[layer][index : index + 1, :, : self.length]
        heads = queries.shape[1]
        first = self.length - self.size
        whole = queries.new_zeros((heads, self.size, queries.shape[2]))
        whole[:, self.start - first : self.stop - first] = queries.transpose(0, 1)
        seen = mask.of(self, queries.dtype, heads // keys.shape[1])
        assert seen is not None, "a block has a mask: its queries come one after the other"
        out = attend_chunk(whole, keys, values, seen, head)
        return out[:, self.start - first : self.stop - first].transpose(0, 1)


@dataclass(eq=False, slots=True)
class Padding(AttentionSpan):
    """Rows that belong to no sequence: they only give a pass its shape."""

    value_size: Callable[[int], int]
    """By layer: the size of a value, which is that of what is seen."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        pass

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        return queries.new_zeros((*queries.shape[:2], self.value_size(layer)))


@dataclass(eq=False, slots=True)
class SingleDecodeSpan(AttentionSpan):
    """The next token of one sequence."""

    bank: SlotPool
    index: int

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.bank.keys[layer][self.index, :, self.length - 1] = keys[0]
        self.bank.values[layer][self.index, :, self.length - 1] = values[0]

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        keys = self.bank.keys[layer][self.index : self.index + 1, :, : self.length]
        values = self.bank.values[layer][self.index : self.index + 1, :, : self.length]
        return attend_singles(queries, keys, values, mask.of(self, queries.dtype), head)

    def advance(self) -> None:
        """The position is the plan's, which has moved it on already."""
        self.length += 1

    def steady(self, length: int) -> AttentionSpan:
        return BatchDecodeSpan(
            rows=self.rows,
            length=min(length, self.bank.capacity),
            even=False,
            query_positions=self.query_positions,
            bank=self.bank,
            first=self.index,
            lanes=1,
            places=torch.zeros(1, dtype=torch.long, device=self.query_positions.device),
            positions=self.query_positions.view(1),
            dense=True,
        )


@dataclass(eq=False, slots=True)
class BatchDecodeSpan(AttentionSpan):
    """The next token of several sequences, all in one bank, in the order of their lanes."""

    bank: SlotPool
    first: int
    """The first lane."""
    lanes: int
    """How many lanes are looked at."""
    places: Tensor
    """The lane of each row, counted from the first one."""
    positions: Tensor
    dense: bool
    """Whether each of those lanes has a row."""
    _span: slice = field(init=False)
    _rows: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._span = slice(self.first, self.first + self.lanes)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.bank.key_rows[layer].index_put_((self._written(keys.shape[1]),), keys)
        self.bank.value_rows[layer].index_put_((self._written(values.shape[1]),), values)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        keys = self.bank.keys[layer][self._span, :, : self.length]
        values = self.bank.values[layer][self._span, :, : self.length]
        rows = queries if self.dense else self._spread(queries)
        out = attend_singles(rows, keys, values, mask.of(self, queries.dtype), head)
        return out if self.dense else out[self.places]

    def advance(self) -> None:
        """The positions are those of the plan, which has moved them on already."""
        self.length += 1
        if not self.dense:
            self.query_positions += 1
        for rows in self._rows.values():
            rows += 1

    def steady(self, length: int) -> AttentionSpan:
        positions = self.positions
        if not self.dense:
            positions = positions.new_zeros(self.lanes).index_put_((self.places,), positions)
        return replace(
            self,
            length=min(length, self.bank.capacity),
            even=False,
            query_positions=positions[:, None, None, None],
            _rows={},
        )

    @property
    def own(self) -> tuple[Tensor, ...]:
        return (self.places,)

    def _written(self, heads: int) -> Tensor:
        """Where each row's vectors go among those of the bank, [rows, heads]."""
        if heads not in self._rows:
            lanes = (self.places + self.first)[:, None] * heads + torch.arange(heads, device=self.places.device)
            self._rows[heads] = lanes * self.bank.capacity + self.positions[:, None]
        return self._rows[heads]

    def _spread(self, queries: Tensor) -> Tensor:
        """A row for each lane; nobody reads what comes of those in between."""
        rows = queries.new_zeros((self.lanes, *queries.shape[1:]))
        rows[self.places] = queries
        return rows
