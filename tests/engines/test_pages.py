"""The index of what is kept, against a plain list of everything that was put in."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.torch.prefix_cache import PAGE, PageTree


def put(pages: PageTree, space: str, keys: list[int], user: str = "") -> None:
    """As the cache does it: whole pages, then what is left."""
    path = pages.path(space, keys)
    for page in path[1:]:
        page.users.add(user)
    for start in range((len(path) - 1) * PAGE, len(keys), PAGE):
        part = tuple(keys[start : start + PAGE])
        if held := pages.below(path, part):
            held.users.add(user)
            return
        assert pages.add(space, path, part, [torch.tensor(part, dtype=torch.float32)], user)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


sequences = st.lists(st.integers(0, 2), max_size=3 * PAGE)
branches = st.builds(
    lambda base, cut, tail: base[: int(cut * len(base))] + tail,
    st.sampled_from([[i % 3 for i in range(100)], [i % 2 for i in range(100)]]),
    st.floats(0, 1),
    sequences,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), branches), min_size=1, max_size=8), branches)
def test_finds_the_longest_common_beginning_to_the_token(kept: list[tuple[str, list[int]]], asked: list[int]) -> None:
    pages = PageTree()
    for space, keys in kept:
        put(pages, space, keys)
    for space in "ab":
        expected = max((common(keys, asked) for owner, keys in kept if owner == space), default=0)
        match = pages.match(space, asked)
        assert match.tokens == expected
        held = [float(x) for page in match.pages for x in page.data[0]][: match.tokens]
        assert held == asked[: match.tokens]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(branches, min_size=1, max_size=8), st.integers(1, 20))
def test_evicts_the_least_recently_used_tails_first(kept: list[list[int]], evictions: int) -> None:
    pages = PageTree()
    for keys in kept:
        put(pages, "", keys)
    latest = kept[-1]
    pages.match("", latest)
    before, sizes = len(pages), []
    for _ in range(min(evictions, before)):
        sizes.append(pages.evict())
    assert all(0 < size <= 4 * PAGE for size in sizes)
    assert len(pages) == before - len(sizes)
    if len(pages) >= -(-len(latest) // PAGE):
        assert pages.match("", latest).tokens == len(latest), "what was used last goes last"
    while pages.evict():
        pass
    assert (len(pages), pages.nbytes) == (0, 0)
    assert pages.match("", latest).tokens == 0


def test_owners_share_nothing() -> None:
    pages = PageTree()
    put(pages, "one", [1, 2, 3])
    assert pages.match("two", [1, 2, 3]).tokens == 0


def test_media_is_told_apart_by_its_hash() -> None:
    pages = PageTree()
    path = pages.path("", [1, "picture of a cat", 2])
    pages.add("", path, (1, "picture of a cat", 2), [torch.zeros(3)])
    assert pages.match("", [1, "picture of a dog", 2]).tokens == 1
    assert pages.match("", [1, "picture of a cat", 2]).tokens == 3


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(branches, st.booleans()), min_size=1, max_size=10), st.integers(0, 12))
def test_logits_are_found_after_their_own_keys_alone(kept: list[tuple[list[int], bool]], evictions: int) -> None:
    """And they count, and go, with the page they belong to."""
    pages = PageTree()
    ended: set[tuple[int, ...]] = set()
    for keys, ends in kept:
        put(pages, "", keys)
        if ends and keys and pages.ending("", keys) is None:
            pages.attach("", keys, torch.tensor(keys, dtype=torch.float32))
            ended.add(tuple(keys))
    for keys, _ in kept:
        found = pages.ending("", keys)
        assert (found is not None) == (tuple(keys) in ended)
        if found is not None:
            assert found.logits[(len(keys) - 1) % PAGE].tolist() == keys
    assert pages.nbytes == sum(page.nbytes for page in pages._recent)
    for _ in range(evictions):
        pages.evict()
    assert pages.nbytes == sum(page.nbytes for page in pages._recent)
    pages.clear()
    assert pages.nbytes == 0
