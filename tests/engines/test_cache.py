import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.torch import kv_cache
from palaver.engines.torch.kv_cache import KVLayout, Slot, SlotAllocator
from palaver.engines.torch.prefix_cache import PrefixCache
from palaver.errors import CacheFull

LAYOUT = KVLayout(((((2, 4), (2, 4))), ((2, 4), (1, 8))), torch.float32, torch.device("cpu"))
TOKEN = LAYOUT.token_bytes


def fill(lane: Slot, start: int, keys: list[int]) -> None:
    """Stands for the model: what is stored depends on all keys so far."""
    for at in range(start, len(keys)):
        for part in lane.parts(at, at + 1):
            part.fill_(fingerprint(keys[: at + 1]))


def fingerprint(keys: list[int]) -> float:
    return float(hash(tuple(keys)) % 10_007)


def check(lane: Slot, keys: list[int]) -> None:
    for at in range(len(keys)):
        for part in lane.parts(at, at + 1):
            assert bool((part == fingerprint(keys[: at + 1])).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([0, 2000, 6000]),
)
def test_holds_what_was_computed_within_its_bound(requests: list[tuple[int, int, bool]], wide: int) -> None:
    """`wide`: for so many tokens, where banks are widened."""
    limit = (wide or 2000) * TOKEN
    cache = PrefixCache(LAYOUT, limit)
    cache.widens = wide > 0
    open_lanes: list[tuple[Slot, list[int]]] = []
    for branch, length, stays in requests:
        keys = [0] * 40 + [branch] * length
        try:
            lane, known = cache.open("", keys[:-1], len(keys))
        except CacheFull:
            cache.close(open_lanes.pop()[0], "", [])
            continue
        try:
            check(lane, keys[:known])
            cache.grow(lane, len(keys) + 100, known)
            check(lane, keys[:known])
            fill(lane, known, keys)
            cache.keep(lane, "", keys)
        except CacheFull:
            keys = keys[:known]
        assert cache.statistics.used_bytes <= limit
        if stays:
            open_lanes.append((lane, keys))
        else:
            cache.close(lane, "", [])
        for other, held in open_lanes:
            check(other, held)


def test_full_banks_become_one_that_is_wider() -> None:
    cache = PrefixCache(LAYOUT, 1 << 24)
    cache.widens = True
    lanes = []
    for number in range(20):
        lane, _ = cache.open("", [number] * 20, 100)
        fill(lane, 0, [number] * 20)
        lanes.append(lane)
    assert len({id(lane.bank) for lane in lanes}) == 1
    assert len({lane.index for lane in lanes}) == len(lanes)
    for number, lane in enumerate(lanes):
        check(lane, [number] * 20)
        cache.close(lane, "", [number] * 20)
    _, known = cache.open("", [3] * 20, 100)
    assert known == 20


def test_many_conversations_stay_within_the_bound_and_the_latest_is_kept() -> None:
    limit = 3000 * TOKEN
    cache = PrefixCache(LAYOUT, limit)
    for conversation in range(50):
        keys = [conversation] * 500
        lane, _ = cache.open("", keys[:-1], len(keys))
        fill(lane, 0, keys)
        before = cache.statistics
        cache.keep(lane, "", keys)
        cache.close(lane, "", [])
        after = cache.statistics
        assert after.used_bytes <= limit
        assert after.evictions - before.evictions <= 500 // 32 + 1, "in small pieces, never all at once"
        assert cache.known("", keys) == 500
    assert cache.statistics.evictions > 0


def test_what_fits_can_be_had_in_one_piece_and_grown_into() -> None:
    """Room for 7,281 tokens, as an 8B model has on the CPU."""
    limit = 7_281 * TOKEN
    for length in (4_100, 5_000, 7_168):
        cache = PrefixCache(LAYOUT, limit)
        cache.check(length)
        lane, _ = cache.open("", [1] * 50, length)
        assert lane.bank.capacity >= length
        assert cache.statistics.used_bytes <= limit
    cache = PrefixCache(LAYOUT, limit)
    keys = [5] * 100
    lane, _ = cache.open("", keys[:-1], 100)
    fill(lane, 0, keys)
    for length in (200, 1_000, 2_000, 4_000, 4_100, 5_000, 6_000, 7_000, 7_168):
        cache.grow(lane, length, 100)
        check(lane, keys)
        assert lane.bank.capacity >= length
        assert cache.statistics.used_bytes <= limit
    with pytest.raises(CacheFull, match="needs 7169 tokens of cache but there is room for 7168"):
        cache.grow(lane, 7_169, 100)
    check(lane, keys)


def test_two_that_fit_run_beside_each_other() -> None:
    cache = PrefixCache(LAYOUT, 7_281 * TOKEN)
    first, _ = cache.open("", [1] * 50, 4_000)
    second, _ = cache.open("", [2] * 50, 3_000)
    assert first.bank.capacity + second.bank.capacity <= 7_281
    with pytest.raises(CacheFull):
        cache.grow(first, 5_000, 50)


def test_the_next_turn_of_a_long_conversation_finds_what_no_page_had_room_for() -> None:
    cache = PrefixCache(LAYOUT, 7_281 * TOKEN)
    keys = [9] * 60
    lane, _ = cache.open("", keys[:-1], 4_000)
    fill(lane, 0, keys)
    cache.close(lane, "", keys)
    again, known = cache.open("", [*keys, 1, 2, 3], 4_200)
    assert known == 60
    assert again.bank.capacity >= 4_200
    check(again, keys)


def test_a_lane_that_cannot_grow_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(LAYOUT, 1_000 * TOKEN)
    lane, _ = cache.open("", [1] * 20, 512)
    fill(lane, 0, [1] * 20)
    whole = kv_cache.SlotPool.__init__

    def too_little(self: kv_cache.SlotPool, layout: KVLayout, capacity: int, count: int) -> None:
        if capacity > 512:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        whole(self, layout, capacity, count)

    monkeypatch.setattr(kv_cache.SlotPool, "__init__", too_little)
    with pytest.raises(CacheFull):
        cache.grow(lane, 700, 20)
    check(lane, [1] * 20)
    cache.close(lane, "", [1] * 20)


def test_more_than_the_cache_holds_is_refused_with_figures() -> None:
    cache = PrefixCache(LAYOUT, 256 * TOKEN)
    with pytest.raises(CacheFull, match="needs 300 tokens of cache but there is room for 256"):
        cache.check(300)
    first, _ = cache.open("", [1], 200)
    with pytest.raises(CacheFull):
        cache.open("", [2], 200)
    cache.close(first, "", [])
    cache.open("", [2], 200)


def test_a_free_lane_that_still_holds_the_beginning_is_taken_again() -> None:
    cache = PrefixCache(LAYOUT, 3000 * TOKEN)
    keys = list(range(100))
    lane, _ = cache.open("", [], 100)
    other, _ = cache.open("", [], 100)
    fill(lane, 0, keys)
    place = (lane.bank, lane.index)
    cache.close(other, "", [7])
    cache.close(lane, "", keys)
    stranger, known = cache.open("somebody else", keys[:50], 100)
    assert known == 0
    again, known = cache.open("", [*keys[:60], 5], 100)
    assert (known, again.bank, again.index) == (60, *place)
    check(again, keys[:60])
    assert (stranger.bank, stranger.index) != place


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=60), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=60))
def test_what_a_free_lane_holds_is_counted_to_the_token(held: list[int], cut: int, tail: list[int]) -> None:
    asked = held[:cut] + tail
    lanes = SlotAllocator(LAYOUT, 0)
    lanes.close(lanes.open(60), "", held)
    _, known = lanes.warmest("", asked, 128)
    pairs = zip(held, asked, strict=False)
    assert known == next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(asked)))


def test_where_a_wider_bank_cant_be_had_there_is_another_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(LAYOUT, 1 << 24)
    cache.widens = True

    def none(self: SlotAllocator, capacity: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SlotAllocator, "widen", none)
    lanes = [cache.open("", [number] * 20, 100)[0] for number in range(20)]
    assert len({(id(lane.bank), lane.index) for lane in lanes}) == len(lanes)


def test_one_that_stays_does_not_hold_the_lanes_of_all() -> None:
    """After a crowd of each length has gone but for one, there is room for a long one."""
    limit = 1 << 17
    cache = PrefixCache(LAYOUT, limit * TOKEN)
    cache.widens = True
    stays = []
    for capacity in (128, 256, 512, 1024, 2048, 4096):
        lanes = [cache.open("", [capacity + i], capacity)[0] for i in range(min(32, limit // 8 // capacity))]
        for lane in lanes[1:]:
            cache.close(lane, "", [])
        fill(lanes[0], 0, [capacity] * 5)
        stays.append((lanes[0], [capacity] * 5))
    cache.open("", [1], limit // 2)
    assert cache.statistics.used_bytes <= limit * TOKEN
    for lane, keys in stays:
        check(lane, keys)


def test_nobody_holds_on_to_lanes_that_have_gone() -> None:
    cache = PrefixCache(LAYOUT, 3000 * TOKEN)
    moves = []
    cache.moved = lambda: moves.append(cache.statistics.used_bytes)
    lane, _ = cache.open("", [1] * 20, 1000)
    cache.close(lane, "", [1] * 20)
    cache.open("", [2] * 20, 2000)  # the first one's lane makes way
    assert moves


def test_less_memory_than_was_promised_is_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(LAYOUT, 1 << 24)

    def none(self: SlotAllocator, capacity: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SlotAllocator, "_new_bank", none)
    with pytest.raises(CacheFull):
        cache.open("", [1] * 20, 100)
