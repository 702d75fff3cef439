"""One pass: the tokens of all its sequences in a row, and the parts they are attended for in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from palaver.engines.torch.attention import (
    AttentionSpan,
    BatchDecodeSpan,
    Block,
    MaskRule,
    Padding,
    PrefillSpan,
    SingleDecodeSpan,
)
from palaver.engines.torch.attention_kernels import AttentionHead
from palaver.engines.torch.kv_cache import Slot, SlotPool


class BatchInputs:
    """The token and the position of each row, in tensors that stay the same while the rows move on together."""

    def __init__(self, ids: Sequence[int], positions: Sequence[int], device: torch.device) -> None:
        self._both = torch.tensor([ids, positions], device=device)
        self.ids, self.positions = self._both
        self._plain = self._both.numpy() if device.type == "cpu" else None
        """The same memory as a plain array: to change a few numbers in it takes a tenth of the time."""

    def take(self, others: BatchInputs) -> None:
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
class ForwardBatch:
    """One forward pass: the tokens of all its sequences in a row, and the parts they are attended for in."""

    numbers: BatchInputs
    parts: tuple[AttentionSpan, ...]
    last: Tensor
    """The row of each sequence's last token, in the order the sequences were given."""
    picks: bool
    """Whether that is anything else than each row in turn."""
    furthest: int
    """The largest position."""
    runs: list[SequenceChunk]
    """The sequences in the order of the rows."""
    order: tuple[int, ...]
    """Where each of them was in the order given."""
    asked: bool
    """Whether anybody wants logits, not only what is kept of the tokens."""
    ends: ForwardBatch | None
    """Where several tokens of a sequence are computed and logits are asked for: the last of each, as a step."""
    long: bool
    """Whether its sequences take the frequencies for long texts (`rope.py`)."""

    @property
    def ids(self) -> Tensor:
        return self.numbers.ids

    @property
    def positions(self) -> Tensor:
        return self.numbers.positions

    def followed_by(self, runs: Sequence[SequenceChunk]) -> bool:
        """Whether these are the next single tokens of the same sequences in the same places."""
        if len(runs) != len(self.runs):
            return False
        return all(before.leads_to(runs[i]) for before, i in zip(self.runs, self.order, strict=True))

    def advance(self, runs: Sequence[SequenceChunk]) -> None:
        """Becomes the plan for these runs, which follow its own; cheaper than a new one."""
        self.runs = [runs[i] for i in self.order]
        self.numbers.advance([run.ids[0] for run in self.runs])
        self.furthest += 1
        for part in self.parts:
            part.advance()

    @property
    def steps(self) -> bool:
        """Whether it is the next single token of each sequence, and what comes after it is asked for."""
        return self.asked and self.ends is None

    def steady(self, length: int) -> ForwardBatch:
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

    def attend(self, layer: int, queries: Tensor, mask: MaskRule, head: AttentionHead) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, queries, mask, head)
        return torch.cat([part.attend(layer, queries[part.rows], mask, head) for part in self.parts])


@dataclass(slots=True)
class SequenceChunk:
    """Tokens of one sequence that come next in its lane."""

    lane: Slot
    bank: SlotPool
    index: int
    """Where the lane is, for it may move."""
    start: int
    ids: Sequence[int]
    long: bool = False
    """Whether the sequence takes the frequencies for long texts (`rope.py`)."""

    @property
    def end(self) -> SequenceChunk:
        """The last of them alone."""
        return replace(self, start=self.start + len(self.ids) - 1, ids=self.ids[-1:])

    def leads_to(self, other: SequenceChunk) -> bool:
        same = self.bank is other.bank and self.index == other.index
        return same and len(self.ids) == 1 == len(other.ids) and self.start + 1 == other.start


def sequence_chunk(lane: Slot, start: int, ids: Sequence[int], long: bool = False) -> SequenceChunk:
    return SequenceChunk(lane, lane.bank, lane.index, start, ids, long)


def plan_block(
    runs: Sequence[SequenceChunk], rows: int, before: int, device: torch.device, asked: bool
) -> ForwardBatch:
    """A pass of so many rows in all, for tokens of one aligned block of each sequence; logits come for every row.

    `before`: rows of padding in front; the rest is behind. Padding repeats the token that is next to it.
    """
    tokens = [(token_id, run.start + i) for run in runs for i, token_id in enumerate(run.ids)]
    after = rows - before - len(tokens)
    tokens = [*tokens[:1] * before, *tokens, *tokens[-1:] * after]
    numbers = BatchInputs([token_id for token_id, _ in tokens], [at for _, at in tokens], device)
    parts: list[AttentionSpan] = []
    if before:
        parts.append(_padding(slice(0, before), runs[0], numbers.positions))
    row = before
    for run in runs:
        parts.append(_block(run, row, rows, device))
        row += len(run.ids)
    if after:
        parts.append(_padding(slice(row, rows), runs[0], numbers.positions))
    return ForwardBatch(
        numbers=numbers,
        parts=tuple(parts),
        last=torch.arange(rows, device=device),
        picks=False,
        furthest=max(run.start + len(run.ids) for run in runs) - 1,
        runs=list(runs),
        order=tuple(range(len(runs))),
        asked=asked,
        ends=None,
        long=runs[0].long,
    )


def _block(run: SequenceChunk, row: int, size: int, device: torch.device) -> Block:
    first = run.start - run.start % size
    return Block(
        rows=slice(row, row + len(run.ids)),
        length=first + size,
        even=False,
        query_positions=torch.arange(first, first + size, device=device)[None, None, :, None],
        lane=run.lane,
        start=run.start,
        stop=run.start + len(run.ids),
        size=size,
    )


def _padding(rows: slice, run: SequenceChunk, positions: Tensor) -> Padding:
    values = run.bank.values
    return Padding(rows, 0, True, positions, value_size=lambda layer: values[layer].shape[-1])


def build_batch(runs: Sequence[SequenceChunk], device: torch.device, asked: bool = True) -> ForwardBatch:
    several = asked and any(len(run.ids) > 1 for run in runs)
    order = sorted(range(len(runs)), key=lambda i: (len(runs[i].ids) > 1, id(runs[i].bank), runs[i].index))
    ordered = [runs[i] for i in order]
    groups = _groups(ordered)
    numbers = BatchInputs(
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
    return ForwardBatch(
        numbers=numbers,
        parts=tuple(parts),
        last=torch.tensor(last, device=device),
        picks=last != list(range(end)),
        furthest=max(run.start + len(run.ids) for run in runs) - 1,
        runs=ordered,
        order=tuple(order),
        asked=asked,
        ends=build_batch([run.end for run in runs], device) if several else None,
        long=runs[0].long,
    )


def _groups(runs: Sequence[SequenceChunk]) -> list[list[SequenceChunk]]:
    """Single tokens of one bank go together, unless more lanes would be looked at in vain than in earnest."""
    groups: list[list[SequenceChunk]] = []
    for run in runs:
        group = groups[-1] if groups else []
        single = len(run.ids) == 1 and group and len(group[0].ids) == 1
        if single and group[0].bank is run.bank and _dense_enough([*group, run]):
            group.append(run)
        else:
            groups.append([run])
    return groups


def _dense_enough(group: Sequence[SequenceChunk]) -> bool:
    return group[-1].index - group[0].index + 1 <= 2 * len(group)


def _part(group: Sequence[SequenceChunk], row: int, positions: Tensor) -> AttentionSpan:
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
    return BatchDecodeSpan(
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


def _single(run: SequenceChunk, row: int, positions: Tensor) -> SingleDecodeSpan:
    rows = slice(row, row + 1)
    return SingleDecodeSpan(
        rows=rows,
        length=run.start + 1,
        even=True,
        query_positions=positions[rows][:, None, None, None],
        bank=run.bank,
        index=run.index,
    )


def _chunk(run: SequenceChunk, row: int, positions: Tensor) -> PrefillSpan:
    rows = slice(row, row + len(run.ids))
    return PrefillSpan(
        rows=rows,
        length=run.start + len(run.ids),
        even=False,
        query_positions=positions[rows][None, None, :, None],
        lane=run.lane,
        start=run.start,
    )
