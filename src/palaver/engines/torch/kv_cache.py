"""Keys and values of running sequences: each has a lane, contiguous in memory, beside others of its capacity.

Capacities are powers of two as long as there is memory, so sequences in one bank differ in length by little and one
padded call attends for all of them. Where memory is short a lane is as long as it must be, in steps of SMALLEST."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 128
"""Tokens in the smallest lane; every capacity is a multiple of it."""
WIDEST = 8
"""Lanes in a new bank."""
MOST = 32
"""Lanes in a bank that was widened."""

Shape = tuple[int, int]
"""Heads and size of a head."""
Left = tuple[Hashable, Sequence[Hashable], str]
"""A space, the keys whose values a lane was left with, and by which conversation."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token takes in the cache: the shapes of each layer's key and value."""

    layers: tuple[tuple[Shape, Shape], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def groups(self) -> dict[Shape, int]:
        """How many keys and values have each shape; those of one shape lie in one tensor."""
        counts: dict[Shape, int] = {}
        for pair in self.layers:
            for shape in pair:
                counts[shape] = counts.get(shape, 0) + 1
        return counts

    @property
    def token_bytes(self) -> int:
        return sum(heads * size for pair in self.layers for heads, size in pair) * self.dtype.itemsize


class SlotPool:
    """Lanes of one capacity. `keys[layer]` and `values[layer]` are [lanes, heads, capacity, size]."""

    def __init__(self, layout: KVLayout, capacity: int, lanes: int) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self.free = list(range(lanes - 1, -1, -1))
        self.groups = {
            # zeros, for what is masked out must not be NaN
            (heads, size): torch.zeros((count, lanes, heads, capacity, size), dtype=layout.dtype, device=layout.device)
            for (heads, size), count in layout.groups.items()
        }
        self.keys, self.values = _views(layout, self.groups)
        self.key_rows = [keys.view(-1, keys.shape[-1]) for keys in self.keys]
        self.value_rows = [values.view(-1, values.shape[-1]) for values in self.values]
        """The same as one long list of vectors, which is quicker to write to."""

    @property
    def empty(self) -> bool:
        return len(self.free) == self.lanes

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups.values())


def _views(layout: KVLayout, groups: dict[Shape, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    taken = dict.fromkeys(groups, 0)
    views: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in layout.layers:
        for shape, view in zip(pair, views, strict=True):
            view.append(groups[shape][taken[shape]])
            taken[shape] += 1
    return views


Place = tuple[SlotPool, int]


class Slot:
    """A place in a bank. It may move; whoever holds it sees where it is."""

    __slots__ = ("bank", "index")

    def __init__(self, bank: SlotPool, index: int) -> None:
        self.bank = bank
        self.index = index

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """Views of what is held at these positions, a group each: [members, heads, tokens, size]."""
        return [group[:, self.index, :, start:stop] for group in self.bank.groups.values()]


class SlotAllocator:
    """All banks. A bank never grows: more lanes of a capacity are another bank, so nothing is held twice."""

    def __init__(self, layout: KVLayout, bank_bytes: int) -> None:
        self._layout = layout
        self._bank_bytes = bank_bytes
        self._banks: list[SlotPool] = []
        self._open: set[Slot] = set()
        self._left: dict[Place, Left] = {}
        """What free lanes still hold, those left longest ago first."""

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self._banks)

    def needed(self, capacity: int) -> int:
        """The bytes that opening a lane of this capacity would allocate."""
        return 0 if self._with_room(capacity) else self._width(capacity) * self._lane_bytes(capacity)

    def open(self, tokens: int) -> Slot:
        """A lane for so many tokens, whatever the memory; what it holds is nobody's."""
        return self.open_cold(capacity_of(tokens))

    def open_cold(self, capacity: int) -> Slot:
        return self._opened(self._coldest(capacity))

    def warmest(self, space: Hashable, keys: Sequence[Hashable], most: int) -> tuple[Place | None, int]:
        """The free lane of no more than this capacity that holds most of these keys, if there is one, and how many."""
        best: tuple[Place | None, int] = (None, 0)
        for place, (owner, left, _) in self._left.items():
            common = _common(left, keys) if owner == space and place[0].capacity <= most else 0
            if common > best[1]:
                best = (place, common)
        return best

    def open_warm(self, place: Place) -> tuple[Slot, Left]:
        """The free lane there, and what it was left with."""
        left = self._left[place]
        return self._opened(place), left

    def grow(self, lane: Slot, capacity: int, used: int) -> None:
        """Moves the lane, with the `used` tokens it holds, to one of this capacity."""
        bank, index, held = lane.bank, lane.index, lane.parts(0, used)
        lane.bank, lane.index = self._take(self._coldest(capacity))
        copy_all(lane.parts(0, used), held)
        _release(bank, index)

    def bank_bytes(self, lane: Slot) -> int:
        """The bytes that are free once this lane is, before it is anywhere else: 0 where others share its bank."""
        return lane.bank.nbytes if len(lane.bank.free) == lane.bank.lanes - 1 else 0

    def replace(self, lane: Slot, capacity: int, used: int) -> None:
        """As `grow`, but its bank, which no other lane uses, is given back before there is a new one. What it holds
        waits in the host's memory."""
        old = lane.bank
        held = [part.to("cpu", copy=True) for part in lane.parts(0, used)]
        self._banks.remove(old)
        self._left = {place: left for place, left in self._left.items() if place[0] is not old}
        before = old.capacity
        del old  # its memory is needed
        lane.bank = SlotPool(self._layout, 0, 1)
        try:
            bank = SlotPool(self._layout, capacity, 1)
        except BaseException:
            bank = SlotPool(self._layout, before, 1)
            raise
        finally:
            self._banks.append(bank)
            lane.bank, lane.index = self._take((bank, 0))
            copy_all(lane.parts(0, used), held)

    def close(self, lane: Slot, space: Hashable = None, keys: Sequence[Hashable] = (), user: str = "") -> None:
        """Frees the lane; as long as nobody needs it, it still holds these."""
        if keys:
            self._left[lane.bank, lane.index] = (space, keys, user)
        self._open.remove(lane)
        _release(lane.bank, lane.index)

    def wider(self, capacity: int) -> int:
        """The bytes of a bank with twice the lanes of this capacity, where all of them are taken; otherwise 0."""
        lanes = 2 * sum(bank.lanes for bank in self._of(capacity))
        return 0 if lanes > MOST or self._with_room(capacity) else lanes * self._lane_bytes(capacity)

    def widen(self, capacity: int) -> None:
        """Moves all lanes of this capacity, which are taken, to one bank with twice as many: one call attends for a
        whole bank."""
        full = self._of(capacity)
        wide = SlotPool(self._layout, capacity, 2 * sum(bank.lanes for bank in full))
        at = 0
        for bank in full:
            for shape, group in bank.groups.items():
                wide.groups[shape][:, at : at + bank.lanes].copy_(group)
            for lane in self._open:
                if lane.bank is bank:
                    lane.bank, lane.index = wide, lane.index + at
            at += bank.lanes
        wide.free = wide.free[:-at]
        self._banks = [bank for bank in self._banks if bank.capacity != capacity] + [wide]

    def narrow(self, spare: int) -> bool:
        """Undoes `widen`: moves the few lanes of a wide bank that are in use to one that has no others, where it takes
        no more than the spare bytes. Whether there was such a bank."""
        for bank in self._banks:
            used = [lane for lane in self._open if lane.bank is bank]
            sparse = bank.lanes > self._width(bank.capacity) and 4 * len(used) <= bank.lanes
            if sparse and used and len(used) * self._lane_bytes(bank.capacity) <= spare:
                self._replace(bank, used)
                return True
        return False

    def _replace(self, bank: SlotPool, used: list[Slot]) -> None:
        small = SlotPool(self._layout, bank.capacity, len(used))
        small.free = []
        for index, lane in enumerate(used):
            held = lane.parts(0, bank.capacity)
            lane.bank, lane.index = small, index
            copy_all(lane.parts(0, bank.capacity), held)
        self._banks = [other for other in self._banks if other is not bank] + [small]
        self._left = {place: left for place, left in self._left.items() if place[0] is not bank}

    def forget(self, user: str) -> None:
        """What this one left is not looked for any more; banks that hold nothing else are given back."""
        self._left = {place: left for place, left in self._left.items() if left[2] != user}
        held = {bank for bank, _ in self._left}
        self._banks = [bank for bank in self._banks if bank in held or not bank.empty]

    def trim(self) -> None:
        """Gives back banks nobody uses."""
        self._banks = [bank for bank in self._banks if not bank.empty]
        self._left = {place: left for place, left in self._left.items() if not place[0].empty}

    def _opened(self, place: Place) -> Slot:
        lane = Slot(*self._take(place))
        self._open.add(lane)
        return lane

    def _take(self, place: Place) -> Place:
        bank, index = place
        self._left.pop(place, None)
        bank.free.remove(index)
        return bank, index

    def _coldest(self, capacity: int) -> Place:
        """A free lane that holds nothing, else the one left longest ago, else one in a new bank."""
        banks = self._of(capacity)
        cold = ((bank, index) for bank in banks for index in reversed(bank.free) if (bank, index) not in self._left)
        left = (place for place in self._left if place[0].capacity == capacity)
        return next(cold, None) or next(left, None) or (self._new_bank(capacity), 0)

    def _new_bank(self, capacity: int) -> SlotPool:
        bank = SlotPool(self._layout, capacity, self._width(capacity))
        self._banks.append(bank)
        return bank

    def _with_room(self, capacity: int) -> SlotPool | None:
        return next((bank for bank in self._of(capacity) if bank.free), None)

    def _of(self, capacity: int) -> list[SlotPool]:
        return [bank for bank in self._banks if bank.capacity == capacity]

    def _width(self, capacity: int) -> int:
        """How many lanes a bank has: as many as one call should attend for, unless they are big."""
        return max(1, min(WIDEST, self._bank_bytes // self._lane_bytes(capacity)))

    def _lane_bytes(self, capacity: int) -> int:
        return capacity * self._layout.token_bytes


def _common(left: Sequence[Hashable], keys: Sequence[Hashable]) -> int:
    """How many keys both begin with: halves are compared, not key by key."""
    start, size = 0, min(len(left), len(keys))
    if left[:size] == keys[:size]:
        return size
    while size > 1:
        half = size // 2
        if left[start : start + half] == keys[start : start + half]:
            start, size = start + half, size - half
        else:
            size = half
    return start


def _release(bank: SlotPool, index: int) -> None:
    bank.free.append(index)
    bank.free.sort(reverse=True)  # the lowest is taken next, so that lanes in use lie close together


def capacity_of(tokens: int) -> int:
    """The usual capacity of a lane for so many tokens."""
    capacity = SMALLEST
    while capacity < tokens:
        capacity *= 2
    return capacity


def capacities_of(tokens: int) -> list[int]:
    """Capacities of a lane for so many tokens, the best first: the usual one, one with some room, the smallest."""
    usual = capacity_of(tokens)
    roomy, least = (-(-size // SMALLEST) * SMALLEST for size in (tokens + tokens // 8, max(tokens, 1)))
    return sorted({usual, min(roomy, usual), least}, reverse=True)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
