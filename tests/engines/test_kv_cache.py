"""Slots and the prefix cache on them: contents survive moves and reuse, within the bound on memory."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.core import kv_cache
from palaver.engines.core.kv_cache import HostMemory, KVLayout, Slot, SlotAllocator
from palaver.engines.core.prefix_cache import PrefixCache
from palaver.engines.torch.devices import TensorLayout, TensorMemory
from palaver.errors import CacheFull

SHAPES = (((2, 4), (2, 4)), ((2, 4), (1, 8)))
TOKEN = KVLayout(SHAPES, HostMemory()).bytes_per_token


@pytest.fixture(scope="module", params=["numpy", "torch"])
def layout(request: pytest.FixtureRequest) -> KVLayout[Any]:
    if request.param == "numpy":
        return KVLayout(SHAPES, HostMemory())
    return TensorLayout(SHAPES, TensorMemory(torch.float32, torch.device("cpu")))


def fill(slot: Slot[Any], start: int, keys: list[int]) -> None:
    """Stands in for the model: the contents depend on all keys so far."""
    for at in range(start, len(keys)):
        for view in slot.views(at, at + 1):
            view[...] = fingerprint(keys[: at + 1])


def fingerprint(keys: list[int]) -> float:
    return float(hash(tuple(keys)) % 10_007)


def check(slot: Slot[Any], keys: list[int]) -> None:
    for at in range(len(keys)):
        for view in slot.views(at, at + 1):
            assert bool((view == fingerprint(keys[: at + 1])).all())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([0, 2000, 6000]),
)
def test_slots_hold_what_was_computed_within_the_bound(
    layout: KVLayout[Any], requests: list[tuple[int, int, bool]], wide: int
) -> None:
    """`wide`: the bound in tokens where pools are widened; 0 where they are not."""
    limit = (wide or 2000) * TOKEN
    cache = PrefixCache(layout, limit)
    cache.widens_pools = wide > 0
    open_slots: list[tuple[Slot[Any], list[int]]] = []
    for branch, length, stays in requests:
        keys = [0] * 40 + [branch] * length
        try:
            slot, cached = cache.allocate("", keys[:-1], len(keys))
        except CacheFull:
            cache.free(open_slots.pop()[0], "", [])
            continue
        try:
            check(slot, keys[:cached])
            cache.grow(slot, len(keys) + 100, cached)
            check(slot, keys[:cached])
            fill(slot, cached, keys)
            cache.insert(slot, "", keys)
        except CacheFull:
            keys = keys[:cached]
        assert cache.statistics.used_bytes <= limit
        if stays:
            open_slots.append((slot, keys))
        else:
            cache.free(slot, "", [])
        for other, held in open_slots:
            check(other, held)


def test_full_pools_are_merged_into_a_wider_one(layout: KVLayout[Any]) -> None:
    cache = PrefixCache(layout, 1 << 24)
    cache.widens_pools = True
    slots = []
    for number in range(20):
        slot, _ = cache.allocate("", [number] * 20, 100)
        fill(slot, 0, [number] * 20)
        slots.append(slot)
    assert len({id(slot.pool) for slot in slots}) == 1
    assert len({slot.index for slot in slots}) == len(slots)
    for number, slot in enumerate(slots):
        check(slot, [number] * 20)
        cache.free(slot, "", [number] * 20)
    _, cached = cache.allocate("", [3] * 20, 100)
    assert cached == 20


def test_many_conversations_stay_within_the_bound_and_the_latest_is_kept(layout: KVLayout[Any]) -> None:
    limit = 3000 * TOKEN
    cache = PrefixCache(layout, limit)
    for conversation in range(50):
        keys = [conversation] * 500
        slot, _ = cache.allocate("", keys[:-1], len(keys))
        fill(slot, 0, keys)
        before = cache.statistics
        cache.insert(slot, "", keys)
        cache.free(slot, "", [])
        after = cache.statistics
        assert after.used_bytes <= limit
        assert after.evictions - before.evictions <= 500 // 32 + 1, "in small pieces, never all at once"
        assert cache.count_cached("", keys) == 500
    assert cache.statistics.evictions > 0


def test_a_sequence_can_use_the_whole_cache_at_once_or_by_growing(layout: KVLayout[Any]) -> None:
    """Room for 7,281 tokens, as an 8B model has on the CPU."""
    limit = 7_281 * TOKEN
    for length in (4_100, 5_000, 7_168):
        cache = PrefixCache(layout, limit)
        cache.check_capacity(length)
        slot, _ = cache.allocate("", [1] * 50, length)
        assert slot.pool.capacity >= length
        assert cache.statistics.used_bytes <= limit
    cache = PrefixCache(layout, limit)
    keys = [5] * 100
    slot, _ = cache.allocate("", keys[:-1], 100)
    fill(slot, 0, keys)
    for length in (200, 1_000, 2_000, 4_000, 4_100, 5_000, 6_000, 7_000, 7_168):
        cache.grow(slot, length, 100)
        check(slot, keys)
        assert slot.pool.capacity >= length
        assert cache.statistics.used_bytes <= limit
    with pytest.raises(CacheFull, match="needs 7,169 tokens of cache but there is room for 7,168"):
        cache.grow(slot, 7_169, 100)
    check(slot, keys)


def test_two_sequences_that_fit_run_together(layout: KVLayout[Any]) -> None:
    cache = PrefixCache(layout, 7_281 * TOKEN)
    first, _ = cache.allocate("", [1] * 50, 4_000)
    second, _ = cache.allocate("", [2] * 50, 3_000)
    assert first.pool.capacity + second.pool.capacity <= 7_281
    with pytest.raises(CacheFull):
        cache.grow(first, 5_000, 50)


def test_the_next_turn_reuses_the_slot_where_pages_had_no_room(layout: KVLayout[Any]) -> None:
    cache = PrefixCache(layout, 7_281 * TOKEN)
    keys = [9] * 60
    slot, _ = cache.allocate("", keys[:-1], 4_000)
    fill(slot, 0, keys)
    cache.free(slot, "", keys)
    again, cached = cache.allocate("", [*keys, 1, 2, 3], 4_200)
    assert cached == 60
    assert again.pool.capacity >= 4_200
    check(again, keys)


def test_a_slot_that_cannot_grow_is_unchanged(layout: KVLayout[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(layout, 1_000 * TOKEN)
    slot, _ = cache.allocate("", [1] * 20, 512)
    fill(slot, 0, [1] * 20)
    original = kv_cache.SlotPool.__init__

    def out_of_memory(self: kv_cache.SlotPool[Any], layout: KVLayout[Any], capacity: int, num_slots: int) -> None:
        if capacity > 512:
            raise MemoryError
        original(self, layout, capacity, num_slots)

    monkeypatch.setattr(kv_cache.SlotPool, "__init__", out_of_memory)
    with pytest.raises(CacheFull):
        cache.grow(slot, 700, 20)
    check(slot, [1] * 20)
    cache.free(slot, "", [1] * 20)


def test_more_than_the_cache_holds_is_refused_with_figures(layout: KVLayout[Any]) -> None:
    cache = PrefixCache(layout, 256 * TOKEN)
    with pytest.raises(CacheFull, match="needs 300 tokens of cache but there is room for 256"):
        cache.check_capacity(300)
    first, _ = cache.allocate("", [1], 200)
    with pytest.raises(CacheFull):
        cache.allocate("", [2], 200)
    cache.free(first, "", [])
    cache.allocate("", [2], 200)


def test_a_free_slot_that_still_holds_the_prefix_is_reused(layout: KVLayout[Any]) -> None:
    cache = PrefixCache(layout, 3000 * TOKEN)
    keys = list(range(100))
    slot, _ = cache.allocate("", [], 100)
    other, _ = cache.allocate("", [], 100)
    fill(slot, 0, keys)
    location = (slot.pool, slot.index)
    cache.free(other, "", [7])
    cache.free(slot, "", keys)
    stranger, cached = cache.allocate("somebody else", keys[:50], 100)
    assert cached == 0
    again, cached = cache.allocate("", [*keys[:60], 5], 100)
    assert (cached, again.pool, again.index) == (60, *location)
    check(again, keys[:60])
    assert (stranger.pool, stranger.index) != location


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=60), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=60))
def test_a_free_slot_matches_to_the_token(layout: KVLayout[Any], held: list[int], cut: int, tail: list[int]) -> None:
    keys = held[:cut] + tail
    slots = SlotAllocator(layout, 0)
    slots.free(slots.allocate(60), "", held)
    _, cached = slots.find_reusable("", keys, 128)
    pairs = zip(held, keys, strict=False)
    assert cached == next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(keys)))


def test_without_memory_for_a_wider_pool_a_narrow_one_is_added(
    layout: KVLayout[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PrefixCache(layout, 1 << 24)
    cache.widens_pools = True

    def out_of_memory(self: SlotAllocator[Any], capacity: int) -> None:
        raise MemoryError

    monkeypatch.setattr(SlotAllocator, "widen", out_of_memory)
    slots = [cache.allocate("", [number] * 20, 100)[0] for number in range(20)]
    assert len({(id(slot.pool), slot.index) for slot in slots}) == len(slots)


def test_one_remaining_sequence_does_not_hold_a_whole_pool(layout: KVLayout[Any]) -> None:
    """After all but one of many sequences of each length are freed, there is room for a long one."""
    limit = 1 << 17
    cache = PrefixCache(layout, limit * TOKEN)
    cache.widens_pools = True
    stays = []
    for capacity in (128, 256, 512, 1024, 2048, 4096):
        slots = [cache.allocate("", [capacity + i], capacity)[0] for i in range(min(32, limit // 8 // capacity))]
        for slot in slots[1:]:
            cache.free(slot, "", [])
        fill(slots[0], 0, [capacity] * 5)
        stays.append((slots[0], [capacity] * 5))
    cache.allocate("", [1], limit // 2)
    assert cache.statistics.used_bytes <= limit * TOKEN
    for slot, keys in stays:
        check(slot, keys)


def test_dropped_slots_are_reported(layout: KVLayout[Any]) -> None:
    cache = PrefixCache(layout, 3000 * TOKEN)
    moves = []
    cache.on_slots_moved = lambda: moves.append(cache.statistics.used_bytes)
    slot, _ = cache.allocate("", [1] * 20, 1000)
    cache.free(slot, "", [1] * 20)
    cache.allocate("", [2] * 20, 2000)  # the first slot is dropped
    assert moves


def test_out_of_memory_below_the_bound_is_a_full_cache(layout: KVLayout[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(layout, 1 << 24)

    def out_of_memory(self: SlotAllocator[Any], capacity: int) -> None:
        raise MemoryError

    monkeypatch.setattr(SlotAllocator, "_new_pool", out_of_memory)
    with pytest.raises(CacheFull):
        cache.allocate("", [1] * 20, 100)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.95 GB, max allowed: 18.13 GB)"), True),
        (RuntimeError("another error"), False),
    ],
)
def test_out_of_memory_has_many_forms_in_torch(error: BaseException, expected: bool) -> None:
    assert TensorMemory(torch.float32, torch.device("cpu")).is_out_of_memory(error) is expected
