"""The radix tree of cached pages, against a plain list of everything that was inserted."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.core.kv_cache import MIN_CAPACITY, HostMemory, KVLayout
from palaver.engines.core.prefix_cache import PAGE_SIZE, RESERVED_PARTS, PageTree, PrefixCache
from palaver.engines.core.sampler import HostLogits


def insert(pages: PageTree[Any], namespace: str, keys: list[int], conversation: str = "") -> None:
    """As PrefixCache does it: full pages, then the rest."""
    path = pages.path(namespace, keys)
    for page in path[1:]:
        page.conversations.add(conversation)
    for start in range((len(path) - 1) * PAGE_SIZE, len(keys), PAGE_SIZE):
        part = tuple(keys[start : start + PAGE_SIZE])
        if cached := pages.find_child(path, part):
            cached.conversations.add(conversation)
            return
        assert pages.insert(namespace, path, [(part, [torch.tensor(part, dtype=torch.float32)])], conversation)


def common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


sequences = st.lists(st.integers(0, 2), max_size=3 * PAGE_SIZE)
branches = st.builds(
    lambda base, cut, tail: base[: int(cut * len(base))] + tail,
    st.sampled_from([[i % 3 for i in range(100)], [i % 2 for i in range(100)]]),
    st.floats(0, 1),
    sequences,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), branches), min_size=1, max_size=8), branches)
def test_matches_the_longest_prefix_to_the_token(inserted: list[tuple[str, list[int]]], query: list[int]) -> None:
    pages: PageTree[Any] = PageTree()
    for namespace, keys in inserted:
        insert(pages, namespace, keys)
    for namespace in "ab":
        expected = max((common_length(keys, query) for owner, keys in inserted if owner == namespace), default=0)
        match = pages.match(namespace, query)
        assert match.tokens == expected
        cached = [float(x) for page in match.pages for x in page.data[0]][: match.tokens]
        assert cached == query[: match.tokens]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(branches, min_size=1, max_size=8), st.integers(1, 20))
def test_evicts_the_least_recently_used_tails_first(inserted: list[list[int]], evictions: int) -> None:
    pages: PageTree[Any] = PageTree()
    for keys in inserted:
        insert(pages, "", keys)
    latest = inserted[-1]
    pages.match("", latest)
    before, sizes = len(pages), []
    for _ in range(min(evictions, before)):
        sizes.append(pages.evict())
    assert all(0 < size <= 4 * PAGE_SIZE for size in sizes)
    assert len(pages) == before - len(sizes)
    if len(pages) >= -(-len(latest) // PAGE_SIZE):
        assert pages.match("", latest).tokens == len(latest), "the most recently used page is evicted last"
    while pages.evict():
        pass
    assert (len(pages), pages.nbytes) == (0, 0)
    assert pages.match("", latest).tokens == 0


def test_owners_share_nothing() -> None:
    pages: PageTree[Any] = PageTree()
    insert(pages, "one", [1, 2, 3])
    assert pages.match("two", [1, 2, 3]).tokens == 0


def test_media_is_told_apart_by_its_hash() -> None:
    pages: PageTree[Any] = PageTree()
    path = pages.path("", [1, "picture of a cat", 2])
    pages.insert("", path, [((1, "picture of a cat", 2), [torch.zeros(3)])])
    assert pages.match("", [1, "picture of a dog", 2]).tokens == 1
    assert pages.match("", [1, "picture of a cat", 2]).tokens == 3


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(branches, st.booleans()), min_size=1, max_size=10), st.integers(0, 12))
def test_logits_are_found_after_their_own_keys_alone(inserted: list[tuple[list[int], bool]], evictions: int) -> None:
    """They are counted and evicted with the page they belong to."""
    pages: PageTree[Any] = PageTree()
    ended: set[tuple[int, ...]] = set()
    for keys, ends in inserted:
        insert(pages, "", keys)
        if ends and keys and pages.find_logits_page("", keys) is None:
            pages.attach_logits("", keys, HostLogits(np.array([keys], dtype=np.float32)))
            ended.add(tuple(keys))
    for keys, _ in inserted:
        found = pages.find_logits_page("", keys)
        assert (found is not None) == (tuple(keys) in ended)
        if found is not None:
            logits = found.logits[(len(keys) - 1) % PAGE_SIZE]
            assert isinstance(logits, HostLogits)
            assert logits.array.tolist() == [keys]
    assert pages.nbytes == sum(page.nbytes for page in pages._lru)
    for _ in range(evictions):
        pages.evict()
    assert pages.nbytes == sum(page.nbytes for page in pages._lru)
    pages.clear()
    assert pages.nbytes == 0


class CountedMemory(HostMemory):
    """Records how much memory is taken in advance."""

    def __init__(self) -> None:
        self.reserved: list[int] = []

    def reserve(self, nbytes: int) -> None:
        self.reserved.append(nbytes)


def test_memory_is_taken_in_large_parts_up_to_the_limit() -> None:
    memory = CountedMemory()
    layout = KVLayout((((1, 4), (1, 4)),), memory)
    limit = 256 * MIN_CAPACITY * layout.bytes_per_token
    cache = PrefixCache(layout, limit)
    for number in range(1000):
        keys = [number, *range(MIN_CAPACITY)]
        slot, _ = cache.allocate("", keys, len(keys))
        cache.insert(slot, "", keys)
        cache.free(slot, "", keys)
        assert cache.statistics.used_bytes <= sum(memory.reserved) <= limit
    assert cache.statistics.evictions
    assert len(memory.reserved) <= RESERVED_PARTS
