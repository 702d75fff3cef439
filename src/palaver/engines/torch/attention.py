"""Attention over lanes: which rows of a forward pass belong to which sequence, and what each may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from palaver.engines.torch.lanes import Bank, Lane
from palaver.engines.torch.scoring import Head, attend_chunk, attend_singles

Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query may see the key; broadcasts."""


class MaskRule:
    """What a query may see of its own sequence. Masks are built once for each part of a pass."""

    def __init__(self, allowed: Allowed | None = None) -> None:
        self._allowed = allowed
        """None: everything up to itself."""
        self._masks: dict[tuple[Part, int], Tensor | None] = {}

    @property
    def causal(self) -> bool:
        return self._allowed is None

    def of(self, part: Part, dtype: torch.dtype, times: int = 1) -> Tensor | None:
        """To be added to scores [sequences, heads, queries, keys]; None where every key is seen.

        `times`: for so many heads one after the other, each with all the queries.
        """
        if (part, times) not in self._masks:
            mask = self._build(part, dtype)
            self._masks[part, times] = mask if mask is None or times == 1 else mask.repeat(1, 1, times, 1)
        return self._masks[part, times]

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

    def steady(self, length: int) -> Part:
        """The same for every step in which no more keys than this are seen: only the positions tell how many."""
        raise NotImplementedError

    @property
    def own(self) -> tuple[Tensor, ...]:
        """What it holds beside the numbers of the plan and the memory of lanes."""
        return ()


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
        seen = mask.of(self, queries.dtype, queries.shape[1] // keys.shape[1])
        assert seen is not None, "a chunk has a mask: its queries come one after the other"
        return attend_chunk(queries.transpose(0, 1), keys, values, seen, head).transpose(0, 1)


@dataclass(eq=False, slots=True)
class Single(Part):
    """The next token of one sequence."""

    bank: Bank
    index: int

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.bank.keys[layer][self.index, :, self.length - 1] = keys[0]
        self.bank.values[layer][self.index, :, self.length - 1] = values[0]

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: Head) -> Tensor:
        keys = self.bank.keys[layer][self.index : self.index + 1, :, : self.length]
        values = self.bank.values[layer][self.index : self.index + 1, :, : self.length]
        return attend_singles(queries, keys, values, mask.of(self, queries.dtype), head)

    def advance(self) -> None:
        """The position is the plan's, which has moved it on already."""
        self.length += 1

    def steady(self, length: int) -> Part:
        return Singles(
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
        out = attend_singles(rows, keys, values, mask.of(self, queries.dtype), head)
        return out if self.dense else out[self.places]

    def advance(self) -> None:
        """The positions are those of the plan, which has moved them on already."""
        self.length += 1
        if not self.dense:
            self.query_positions += 1
        for rows in self._rows.values():
            rows += 1

    def steady(self, length: int) -> Part:
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


class Numbers:
    """The token and the position of each row, in tensors that stay the same while the rows move on together."""

    def __init__(self, ids: Sequence[int], positions: Sequence[int], device: torch.device) -> None:
        self._both = torch.tensor([ids, positions], device=device)
        self.ids, self.positions = self._both
        self._plain = self._both.numpy() if device.type == "cpu" else None
        """The same memory as a plain array: to change a few numbers in it takes a tenth of the time."""

    def take(self, others: Numbers) -> None:
        if others is not self:
            self._both.copy_(others._both)

    def advance(self, ids: Sequence[int]) -> None:
        """These tokens come next in each row."""
        if self._plain is not None:
            self._plain[0] = ids
            self._plain[1] += 1
        else:
            self.ids.copy_(torch.tensor(ids))
            self.positions += 1


@dataclass(slots=True, weakref_slot=True, eq=False)
class Plan:
    """One forward pass: the tokens of all its sequences in a row, and the parts they are attended for in."""

    numbers: Numbers
    parts: tuple[Part, ...]
    last: Tensor
    """The row of each sequence's last token, in the order the sequences were given."""
    picks: bool
    """Whether that is anything else than each row in turn."""
    furthest: int
    """The largest position."""
    runs: list[Run]
    """The sequences in the order of the rows."""
    order: tuple[int, ...]
    """Where each of them was in the order given."""
    asked: bool
    """Whether anybody wants logits, not only what is kept of the tokens."""

    @property
    def ids(self) -> Tensor:
        return self.numbers.ids

    @property
    def positions(self) -> Tensor:
        return self.numbers.positions

    def followed_by(self, runs: Sequence[Run]) -> bool:
        """Whether these are the next single tokens of the same sequences in the same places."""
        if len(runs) != len(self.runs):
            return False
        return all(before.leads_to(runs[i]) for before, i in zip(self.runs, self.order, strict=True))

    def advance(self, runs: Sequence[Run]) -> None:
        """Becomes the plan for these runs, which follow its own; cheaper than a new one."""
        self.runs = [runs[i] for i in self.order]
        self.numbers.advance([run.ids[0] for run in self.runs])
        self.furthest += 1
        for part in self.parts:
            part.advance()

    @property
    def steps(self) -> bool:
        """Whether it is the next single token of each sequence, and what comes after it is asked for."""
        return self.asked and not any(isinstance(part, Chunk) for part in self.parts)

    def steady(self, length: int) -> Plan:
        """The same for every step in which no sequence is longer than this: only the numbers tell how far they are."""
        return replace(self, parts=tuple(part.steady(length) for part in self.parts))

    @property
    def own(self) -> tuple[Tensor, ...]:
        """What a pass reads beside the numbers and the memory of lanes."""
        return (self.last, *(tensor for part in self.parts for tensor in part.own))

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


@dataclass(slots=True)
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


def plan(runs: Sequence[Run], device: torch.device, alone: bool = False, asked: bool = True) -> Plan:
    """`alone`: every sequence is attended for in a call of its own, so that no other one can matter at all."""
    order = sorted(range(len(runs)), key=lambda i: (len(runs[i].ids) > 1, id(runs[i].bank), runs[i].index))
    ordered = [runs[i] for i in order]
    groups = [[run] for run in ordered] if alone else _groups(ordered)
    numbers = Numbers(
        [token_id for run in ordered for token_id in run.ids],
        [run.start + i for run in ordered for i in range(len(run.ids))],
        device,
    )
    parts, row, last = [], 0, [0] * len(runs)
    for group in groups:
        parts.append(_part(group, row, numbers.positions))
        row += sum(len(run.ids) for run in group)
    end = 0
    for i, run in zip(order, ordered, strict=True):
        end += len(run.ids)
        last[i] = end - 1
    return Plan(
        numbers=numbers,
        parts=tuple(parts),
        last=torch.tensor(last, device=device),
        picks=last != list(range(end)),
        furthest=max(run.start + len(run.ids) for run in runs) - 1,
        runs=ordered,
        order=tuple(order),
        asked=asked,
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


def _part(group: Sequence[Run], row: int, positions: Tensor) -> Part:
    first = group[0]
    if len(first.ids) > 1:
        return _chunk(first, row, positions)
    if len(group) == 1:
        return _single(first, row, positions)
    starts = [run.start for run in group]
    lanes = group[-1].index - first.index + 1
    places = [run.index - first.index for run in group]
    dense = lanes == len(group)
    rows = slice(row, row + len(group))
    queries = positions[rows] if dense else _spread_out(starts, places, lanes, positions.device)
    return Singles(
        rows=rows,
        length=max(starts) + 1,
        even=dense and min(starts) == max(starts),
        query_positions=queries[:, None, None, None],
        bank=first.bank,
        first=first.index,
        lanes=lanes,
        places=torch.tensor(places, device=positions.device),
        positions=positions[rows],
        dense=dense,
    )


def _spread_out(starts: Sequence[int], places: Sequence[int], lanes: int, device: torch.device) -> Tensor:
    """A position for each lane; those without a row see their first key."""
    spread = [0] * lanes
    for place, start in zip(places, starts, strict=True):
        spread[place] = start
    return torch.tensor(spread, device=device)


def _single(run: Run, row: int, positions: Tensor) -> Single:
    rows = slice(row, row + 1)
    return Single(
        rows=rows,
        length=run.start + 1,
        even=True,
        query_positions=positions[rows][:, None, None, None],
        bank=run.bank,
        index=run.index,
    )


def _chunk(run: Run, row: int, positions: Tensor) -> Chunk:
    rows = slice(row, row + len(run.ids))
    return Chunk(
        rows=rows,
        length=run.start + len(run.ids),
        even=False,
        query_positions=positions[rows][None, None, :, None],
        lane=run.lane,
        start=run.start,
    )
