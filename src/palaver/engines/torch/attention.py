"""Attention over lanes: which rows of a forward pass belong to which sequence, and what each may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from palaver.engines.torch.lanes import Bank, Lane

Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query may see the key; broadcasts."""


@dataclass(frozen=True, slots=True)
class Head:
    """How scores are computed, besides queries and keys."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """For each head a score that takes part in the softmax and stands for no token."""


class MaskRule:
    """What a query may see of its own sequence. Masks are built once for each part of a pass."""

    def __init__(self, allowed: Allowed | None = None) -> None:
        self._allowed = allowed
        """None: everything up to itself."""
        self._masks: dict[Part, Tensor | None] = {}

    @property
    def causal(self) -> bool:
        return self._allowed is None

    def of(self, part: Part, dtype: torch.dtype) -> Tensor | None:
        """To be added to scores [sequences, heads, queries, keys]; None where every key is seen."""
        if part not in self._masks:
            self._masks[part] = self._build(part, dtype)
        return self._masks[part]

    def _build(self, part: Part, dtype: torch.dtype) -> Tensor | None:
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
class Part:
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

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: Head) -> Tensor:
        """[rows, heads, size] to the same shape, of the values' size."""
        raise NotImplementedError

    def advance(self) -> None:
        """Moves on by one token, in place."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Chunk(Part):
    """Several tokens of one sequence."""

    lane: Lane
    start: int

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        bank, index = self.lane.bank, self.lane.index
        bank.keys[layer][index, :, self.start : self.length] = keys.transpose(0, 1)
        bank.values[layer][index, :, self.start : self.length] = values.transpose(0, 1)

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: Head) -> Tensor:
        bank, index = self.lane.bank, self.lane.index
        keys = bank.keys[layer][index : index + 1, :, : self.length]
        values = bank.values[layer][index : index + 1, :, : self.length]
        out = _attend(queries.transpose(0, 1)[None], keys, values, mask.of(self, queries.dtype), head)
        return out[0].transpose(0, 1)


@dataclass(eq=False, slots=True)
class Singles(Part):
    """The next token of several sequences, all in one bank, in the order of their lanes."""

    bank: Bank
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

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: Head) -> Tensor:
        keys = self.bank.keys[layer][self._span, :, : self.length]
        values = self.bank.values[layer][self._span, :, : self.length]
        rows = queries if self.dense else self._spread(queries)
        out = _attend_singles(rows, keys, values, mask.of(self, queries.dtype), head)
        return out if self.dense else out[self.places]

    def advance(self) -> None:
        self.length += 1
        self.query_positions += 1
        self.positions += 1
        for rows in self._rows.values():
            rows += 1

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


def _attend_singles(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: Head) -> Tensor:
    """One query a sequence: the heads that share a key are taken for so many queries, which saves repeating keys."""
    count, heads, size = queries.shape
    shared = keys.shape[1]
    grouped = queries.view(count, shared, heads // shared, size)
    if head.sinks is None and head.softcap is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=head.scale)
    else:
        sinks = None if head.sinks is None else head.sinks.view(1, shared, heads // shared, 1)
        out = _attend_plainly(grouped, keys, values, mask, head, sinks)
    return out.reshape(count, heads, -1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: Head) -> Tensor:
    """[1, heads, queries, size]."""
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    if head.sinks is None and head.softcap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=head.scale)
    sinks = None if head.sinks is None else head.sinks.view(1, -1, 1, 1)
    return _attend_plainly(queries, keys, values, mask, head, sinks)


def _attend_plainly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: Head, sinks: Tensor | None
) -> Tensor:
    scores = queries @ keys.transpose(-1, -2) * head.scale
    if head.softcap is not None:
        scores = torch.tanh(scores / head.softcap) * head.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return weights[..., : keys.shape[-2]] @ values


@dataclass(slots=True)
class Plan:
    """One forward pass: the tokens of all its sequences in a row, and the parts they are attended for in."""

    ids: Tensor
    positions: Tensor
    parts: tuple[Part, ...]
    last: Tensor
    """The row of each sequence's last token, in the order the sequences were given."""
    picks: bool
    """Whether that is anything else than each row in turn."""
    furthest: int
    """The largest position."""
    runs: tuple[Run, ...]
    """The sequences in the order of the rows."""
    order: tuple[int, ...]
    """Where each of them was in the order given."""

    def followed_by(self, runs: Sequence[Run]) -> bool:
        """Whether these are the next single tokens of the same sequences in the same places."""
        if len(runs) != len(self.runs):
            return False
        return all(before.leads_to(runs[i]) for before, i in zip(self.runs, self.order, strict=True))

    def advance(self, runs: Sequence[Run]) -> None:
        """Becomes the plan for these runs, which follow its own; cheaper than a new one."""
        self.runs = tuple(runs[i] for i in self.order)
        self.ids = torch.tensor([run.ids[0] for run in self.runs], device=self.ids.device)
        self.positions += 1
        self.furthest += 1
        for part in self.parts:
            part.advance()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if len(self.parts) == 1:
            self.parts[0].write(layer, keys, values)
            return
        for part in self.parts:
            part.write(layer, keys[part.rows], values[part.rows])

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: Head) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, queries, mask, head)
        return torch.cat([part.attend(layer, queries[part.rows], mask, head) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence that come next in its lane."""

    lane: Lane
    bank: Bank
    index: int
    """Where the lane is, for it may move."""
    start: int
    ids: Sequence[int]

    def leads_to(self, other: Run) -> bool:
        same = self.bank is other.bank and self.index == other.index
        return same and len(self.ids) == 1 == len(other.ids) and self.start + 1 == other.start


def run_of(lane: Lane, start: int, ids: Sequence[int]) -> Run:
    return Run(lane, lane.bank, lane.index, start, ids)


def plan(runs: Sequence[Run], device: torch.device, alone: bool = False) -> Plan:
    """`alone`: every sequence is attended for in a call of its own, so that no other one can matter at all."""
    order = sorted(range(len(runs)), key=lambda i: (len(runs[i].ids) > 1, id(runs[i].bank), runs[i].index))
    ordered = [runs[i] for i in order]
    groups = [[run] for run in ordered] if alone else _groups(ordered)
    parts, row, last = [], 0, [0] * len(runs)
    for group in groups:
        parts.append(_part(group, row, device))
        row += sum(len(run.ids) for run in group)
    end = 0
    for i, run in zip(order, ordered, strict=True):
        end += len(run.ids)
        last[i] = end - 1
    return Plan(
        ids=torch.tensor([i for run in ordered for i in run.ids], device=device),
        positions=torch.tensor([run.start + i for run in ordered for i in range(len(run.ids))], device=device),
        parts=tuple(parts),
        last=torch.tensor(last, device=device),
        picks=last != list(range(end)),
        furthest=max(run.start + len(run.ids) for run in runs) - 1,
        runs=tuple(ordered),
        order=tuple(order),
    )


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Single tokens of one bank go together, unless more lanes would be looked at in vain than in earnest."""
    groups: list[list[Run]] = []
    for run in runs:
        group = groups[-1] if groups else []
        single = len(run.ids) == 1 and group and len(group[0].ids) == 1
        if single and group[0].bank is run.bank and _dense_enough([*group, run]):
            group.append(run)
        else:
            groups.append([run])
    return groups


def _dense_enough(group: Sequence[Run]) -> bool:
    return group[-1].index - group[0].index + 1 <= 2 * len(group)


def _part(group: Sequence[Run], row: int, device: torch.device) -> Part:
    first = group[0]
    if len(first.ids) > 1:
        return _chunk(first, row, device)
    starts = [run.start for run in group]
    lanes = group[-1].index - first.index + 1
    places = [run.index - first.index for run in group]
    per_lane = [0] * lanes
    for place, start in zip(places, starts, strict=True):
        per_lane[place] = start
    return Singles(
        rows=slice(row, row + len(group)),
        length=max(starts) + 1,
        even=min(per_lane) == max(per_lane),
        query_positions=torch.tensor(per_lane, device=device)[:, None, None, None],
        bank=first.bank,
        first=first.index,
        lanes=lanes,
        places=torch.tensor(places, device=device),
        positions=torch.tensor(starts, device=device),
        dense=lanes == len(group),
    )


def _chunk(run: Run, row: int, device: torch.device) -> Chunk:
    stop = run.start + len(run.ids)
    return Chunk(
        rows=slice(row, row + len(run.ids)),
        length=stop,
        even=False,
        query_positions=torch.arange(run.start, stop, device=device)[None, None, :, None],
        lane=run.lane,
        start=run.start,
    )
