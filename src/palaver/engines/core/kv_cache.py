"""The KV cache of running sequences: slots of contiguous memory, in pools of slots of one capacity. The arrays are
numpy's in the host's memory, or a framework's on its device.

Capacities are powers of two while there is memory: sequences in one pool then have similar lengths, and one padded call
attends for all of them. Where memory is short, a slot is as long as its sequence, in multiples of MIN_CAPACITY."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

HostArray = NDArray[np.float32]
ALIGNMENT = 64
"""The bytes of a cache line, and of the widest vectors."""


class Array(Protocol):
    """What the cache uses of numpy's arrays and of torch's tensors."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    @property
    def reshape(self) -> Any: ...


A = TypeVar("A", bound=Array)


class ArrayMemory(Protocol[A]):
    """Allocates and copies arrays of one element type in one memory."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether it is the memory of the CPU, where moving arrays costs as much as using them."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Takes so much more memory from the device for arrays to come, where that is slow. Raises if there is none."""
        ...

    def zeros(self, shape: tuple[int, ...]) -> A: ...

    def clone(self, array: A) -> A:
        """A contiguous copy."""
        ...

    def copy(self, target: A, source: A) -> None: ...

    def to_host(self, array: A) -> A:
        """A copy in the host's memory."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool: ...


class HostMemory:
    """float32 arrays of numpy."""

    itemsize = 4
    on_host = True

    def reserve(self, nbytes: int) -> None:
        pass

    def zeros(self, shape: tuple[int, ...]) -> HostArray:
        return aligned_zeros(shape, np.float32)

    def clone(self, array: HostArray) -> HostArray:
        return np.array(array, order="C")

    def copy(self, target: HostArray, source: HostArray) -> None:
        target[...] = source

    def to_host(self, array: HostArray) -> HostArray:
        return self.clone(array)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array that begins at a cache line: vectors that cross lines are slower to load."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


MIN_CAPACITY = 128
"""Tokens in the smallest slot; every capacity is a multiple of it."""
SLOTS_PER_POOL = 8
"""Slots in a new pool."""
MAX_SLOTS_PER_POOL = 32
"""Slots in a pool that was widened."""

HeadShape = tuple[int, int]
"""The number of KV heads and the size of a head."""
SlotContents = tuple[Hashable, Sequence[Hashable], str]
"""What a freed slot still holds: the namespace, the keys and the conversation that computed them."""


@dataclass(frozen=True, slots=True)
class KVLayout(Generic[A]):
    """What one token takes in the cache: the shapes of each layer's key and value, and the memory they are in."""

    layer_shapes: tuple[tuple[HeadShape, HeadShape], ...]
    """The key's and the value's shape, by layer."""
    memory: ArrayMemory[A]

    @property
    def shape_counts(self) -> dict[HeadShape, int]:
        """How many keys and values have each shape; those of one shape lie in one array."""
        counts: dict[HeadShape, int] = {}
        for pair in self.layer_shapes:
            for shape in pair:
                counts[shape] = counts.get(shape, 0) + 1
        return counts

    @property
    def bytes_per_token(self) -> int:
        return sum(heads * size for pair in self.layer_shapes for heads, size in pair) * self.memory.itemsize


class SlotPool(Generic[A]):
    """Slots of one capacity. `keys[layer]` and `values[layer]` are [slots, heads, capacity, size]."""

    def __init__(self, layout: KVLayout[A], capacity: int, num_slots: int) -> None:
        self.capacity = capacity
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.buffers: dict[HeadShape, A] = {
            # zeros, because masked values must not be NaN
            (heads, size): layout.memory.zeros((count, num_slots, heads, capacity, size))
            for (heads, size), count in layout.shape_counts.items()
        }
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers.values())
        self.keys, self.values = _layer_views(layout, self.buffers)
        self.flat_keys: list[A] = [keys.reshape(-1, keys.shape[-1]) for keys in self.keys]
        self.flat_values: list[A] = [values.reshape(-1, values.shape[-1]) for values in self.values]
        """The same memory as one list of vectors, which is quicker to write to."""

    @property
    def empty(self) -> bool:
        return len(self.free_slots) == self.num_slots


def _layer_views(layout: KVLayout[A], buffers: dict[HeadShape, A]) -> tuple[list[A], list[A]]:
    used = dict.fromkeys(buffers, 0)
    views: tuple[list[A], list[A]] = ([], [])
    for pair in layout.layer_shapes:
        for shape, view in zip(pair, views, strict=True):
            view.append(buffers[shape][used[shape]])
            used[shape] += 1
    return views


SlotLocation = tuple[SlotPool[A], int]
"""A pool and the index of a slot in it."""


class Slot(Generic[A]):
    """The memory of one sequence. The allocator may move it: `pool` and `index` always say where it is now."""

    __slots__ = ("index", "pool")

    def __init__(self, pool: SlotPool[A], index: int) -> None:
        self.pool = pool
        self.index = index

    def views(self, start: int, stop: int) -> list[A]:
        """Views of the keys and values at these positions, one a buffer: [members, heads, tokens, size]."""
        return [buffer[:, self.index, :, start:stop] for buffer in self.pool.buffers.values()]


class SlotAllocator(Generic[A]):
    """All pools. A pool never grows: more slots of a capacity are another pool, so no copy is made."""

    def __init__(self, layout: KVLayout[A], max_pool_bytes: int) -> None:
        self._layout = layout
        self._max_pool_bytes = max_pool_bytes
        self._pools: list[SlotPool[A]] = []
        self._slots: set[Slot[A]] = set()
        """The slots in use."""
        self._freed: dict[SlotLocation[A], SlotContents] = {}
        """What free slots still hold, least recently freed first."""

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def bytes_needed(self, capacity: int) -> int:
        """The bytes that allocating a slot of this capacity would take."""
        return 0 if self._pool_with_free_slot(capacity) else self._pool_size(capacity) * self._slot_bytes(capacity)

    def allocate(self, tokens: int) -> Slot[A]:
        """A slot for so many tokens, without a check of memory. Its contents are undefined."""
        return self.allocate_capacity(default_capacity(tokens))

    def allocate_capacity(self, capacity: int) -> Slot[A]:
        return self._allocate_at(self._find_free(capacity))

    def find_reusable(
        self, namespace: Hashable, keys: Sequence[Hashable], max_capacity: int
    ) -> tuple[SlotLocation[A] | None, int]:
        """The free slot of at most this capacity that holds the longest prefix of these keys, and its length."""
        best: tuple[SlotLocation[A] | None, int] = (None, 0)
        for location, (owner, held, _) in self._freed.items():
            least = best[1]  # one that holds more has the same key there
            longer = len(held) > least < len(keys) and held[least] == keys[least]
            if longer and owner == namespace and location[0].capacity <= max_capacity:
                common = common_prefix_length(held, keys)
                best = (location, common) if common > least else best
        return best

    def reuse(self, location: SlotLocation[A]) -> tuple[Slot[A], SlotContents]:
        """Allocates the free slot at this location; returns it with what it still holds."""
        contents = self._freed[location]
        return self._allocate_at(location), contents

    def grow(self, slot: Slot[A], capacity: int, used: int) -> None:
        """Moves the slot, with the `used` tokens it holds, to one of this capacity."""
        pool, index, held = slot.pool, slot.index, slot.views(0, used)
        slot.pool, slot.index = self._claim(self._find_free(capacity))
        copy_all(self._layout.memory, slot.views(0, used), held)
        _release(pool, index)

    def exclusive_pool_bytes(self, slot: Slot[A]) -> int:
        """The bytes of the slot's pool, which freeing the slot would free; 0 where other slots share the pool."""
        return slot.pool.nbytes if len(slot.pool.free_slots) == slot.pool.num_slots - 1 else 0

    def grow_via_host(self, slot: Slot[A], capacity: int, used: int) -> None:
        """As `grow`, but frees the slot's pool, which no other slot uses, before it allocates the new one. The tokens
        wait in the host's memory."""
        old = slot.pool
        held = [self._layout.memory.to_host(view) for view in slot.views(0, used)]
        self._pools.remove(old)
        self._drop_contents(old)
        old_capacity = old.capacity
        del old  # its memory is needed
        slot.pool = SlotPool(self._layout, 0, 1)
        try:
            pool = SlotPool(self._layout, capacity, 1)
        except BaseException:
            pool = SlotPool(self._layout, old_capacity, 1)
            raise
        finally:
            self._pools.append(pool)
            slot.pool, slot.index = self._claim((pool, 0))
            copy_all(self._layout.memory, slot.views(0, used), held)

    def free(
        self, slot: Slot[A], namespace: Hashable = None, keys: Sequence[Hashable] = (), conversation: str = ""
    ) -> None:
        """Frees the slot. It can be reused for these keys until it is allocated again."""
        if keys:
            self._freed[slot.pool, slot.index] = (namespace, keys, conversation)
        self._slots.remove(slot)
        _release(slot.pool, slot.index)

    def widened_bytes(self, capacity: int) -> int:
        """The bytes of a pool with twice the slots of this capacity; 0 where a slot is free or the pool too wide."""
        slots = 2 * sum(pool.num_slots for pool in self._pools_of(capacity))
        too_wide = slots > MAX_SLOTS_PER_POOL
        return 0 if too_wide or self._pool_with_free_slot(capacity) else slots * self._slot_bytes(capacity)

    def widen(self, capacity: int) -> None:
        """Moves all slots of this capacity, none of which is free, to one pool with twice as many: one call attends
        for a whole pool."""
        full = self._pools_of(capacity)
        wide = SlotPool(self._layout, capacity, 2 * sum(pool.num_slots for pool in full))
        at = 0
        for pool in full:
            for shape, buffer in pool.buffers.items():
                self._layout.memory.copy(wide.buffers[shape][:, at : at + pool.num_slots], buffer)
            for slot in self._slots:
                if slot.pool is pool:
                    slot.pool, slot.index = wide, slot.index + at
            at += pool.num_slots
        wide.free_slots = wide.free_slots[:-at]
        self._pools = [pool for pool in self._pools if pool.capacity != capacity] + [wide]

    def narrow(self, spare_bytes: int) -> bool:
        """Undoes `widen` for one sparsely used pool: moves its slots in use to a pool without free slots, where that
        takes at most the spare bytes. Returns whether there was such a pool."""
        for pool in self._pools:
            used = [slot for slot in self._slots if slot.pool is pool]
            sparse = pool.num_slots > self._pool_size(pool.capacity) and 4 * len(used) <= pool.num_slots
            if sparse and used and len(used) * self._slot_bytes(pool.capacity) <= spare_bytes:
                self._move_to_small_pool(pool, used)
                return True
        return False

    def _move_to_small_pool(self, pool: SlotPool[A], used: list[Slot[A]]) -> None:
        small = SlotPool(self._layout, pool.capacity, len(used))
        small.free_slots = []
        for index, slot in enumerate(used):
            held = slot.views(0, pool.capacity)
            slot.pool, slot.index = small, index
            copy_all(self._layout.memory, slot.views(0, pool.capacity), held)
        self._pools = [other for other in self._pools if other is not pool] + [small]
        self._drop_contents(pool)

    def forget(self, conversation: str) -> None:
        """Drops what the conversation's freed slots hold, and the pools that hold nothing else."""
        self._freed = {location: held for location, held in self._freed.items() if held[2] != conversation}
        holding = {pool for pool, _ in self._freed}
        self._pools = [pool for pool in self._pools if pool in holding or not pool.empty]

    def trim(self) -> None:
        """Drops the pools without a slot in use, with what their slots still hold."""
        self._pools = [pool for pool in self._pools if not pool.empty]
        self._freed = {location: held for location, held in self._freed.items() if not location[0].empty}

    def _drop_contents(self, pool: SlotPool[A]) -> None:
        self._freed = {location: held for location, held in self._freed.items() if location[0] is not pool}

    def _allocate_at(self, location: SlotLocation[A]) -> Slot[A]:
        slot = Slot(*self._claim(location))
        self._slots.add(slot)
        return slot

    def _claim(self, location: SlotLocation[A]) -> SlotLocation[A]:
        pool, index = location
        self._freed.pop(location, None)
        pool.free_slots.remove(index)
        return pool, index

    def _find_free(self, capacity: int) -> SlotLocation[A]:
        """A free slot that holds nothing, else the least recently freed one, else one in a new pool."""
        pools = self._pools_of(capacity)
        unused = (
            (pool, index) for pool in pools for index in reversed(pool.free_slots) if (pool, index) not in self._freed
        )
        freed = (location for location in self._freed if location[0].capacity == capacity)
        return next(unused, None) or next(freed, None) or (self._new_pool(capacity), 0)

    def _new_pool(self, capacity: int) -> SlotPool[A]:
        pool = SlotPool(self._layout, capacity, self._pool_size(capacity))
        self._pools.append(pool)
        return pool

    def _pool_with_free_slot(self, capacity: int) -> SlotPool[A] | None:
        return next((pool for pool in self._pools_of(capacity) if pool.free_slots), None)

    def _pools_of(self, capacity: int) -> list[SlotPool[A]]:
        return [pool for pool in self._pools if pool.capacity == capacity]

    def _pool_size(self, capacity: int) -> int:
        """How many slots a new pool has: as many as one call should attend for, fewer where slots are big."""
        return max(1, min(SLOTS_PER_POOL, self._max_pool_bytes // self._slot_bytes(capacity)))

    def _slot_bytes(self, capacity: int) -> int:
        return capacity * self._layout.bytes_per_token


def common_prefix_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """By bisection: comparing slices is faster than comparing key by key."""
    start, size = 0, min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    while size > 1:
        half = size // 2
        if a[start : start + half] == b[start : start + half]:
            start, size = start + half, size - half
        else:
            size = half
    return start


def _release(pool: SlotPool[A], index: int) -> None:
    pool.free_slots.append(index)
    pool.free_slots.sort(reverse=True)  # the lowest is taken next, so that slots in use lie close together


def default_capacity(tokens: int) -> int:
    """The smallest power-of-two capacity that holds so many tokens."""
    capacity = MIN_CAPACITY
    while capacity < tokens:
        capacity *= 2
    return capacity


def candidate_capacities(tokens: int) -> list[int]:
    """Capacities of a slot for so many tokens, the preferred first: the default, an eighth to spare, the smallest."""
    default = default_capacity(tokens)
    spare, smallest = (-(-size // MIN_CAPACITY) * MIN_CAPACITY for size in (tokens + tokens // 8, max(tokens, 1)))
    return sorted({default, min(spare, default), smallest}, reverse=True)


def copy_all(memory: ArrayMemory[A], targets: Sequence[A], sources: Sequence[A]) -> None:
    for target, source in zip(targets, sources, strict=True):
        memory.copy(target, source)
