"""The prefix cache: pages of computed tokens in a radix tree, and slots of running sequences, in one memory bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic

from palaver.engines.core.kv_cache import (
    MIN_CAPACITY,
    A,
    KVLayout,
    Slot,
    SlotAllocator,
    SlotLocation,
    candidate_capacities,
    common_prefix_length,
    copy_all,
    default_capacity,
)
from palaver.engines.core.sampler import Logits
from palaver.errors import CacheFull
from palaver.memory import available_bytes

PAGE_SIZE = 32
"""Tokens in a full page."""
MAX_CONVERSATIONS = 16
"""An entry that more conversations use is shared by all, so that the set of names stays bounded."""
POOL_SHARE = 64
"""A new pool takes at most this part of the memory, unless a single slot takes more."""
WIDE_POOL_SHARE = 8
"""The same for a pool that was widened."""
RESERVED_PARTS = 32
"""The memory is taken from the device in at most so many parts, as it fills."""
LOGITS_SHARE = 64
"""Logits after a prompt are cached where they take at most this part of the memory."""

Key = Hashable
"""What stands at a position: a token id, or the hash of the media whose placeholder it is."""


class ConversationRefs:
    """The conversations that use a cache entry. An entry that an unnamed request uses is never released by `forget`."""

    __slots__ = ("_names",)

    def __init__(self, name: str = "") -> None:
        self._names: set[str] | None = {name} if name else None
        """None: shared by all."""

    def add(self, name: str) -> None:
        if self._names is None or name in self._names:
            return
        self._names.add(name)
        if not name or len(self._names) > MAX_CONVERSATIONS:
            self._names = None

    def merge(self, other: ConversationRefs) -> None:
        for name in ("",) if other._names is None else other._names:
            self.add(name)

    def release(self, name: str) -> bool:
        """Returns whether that was the last reference."""
        if self._names is None or name not in self._names:
            return False
        self._names.discard(name)
        return not self._names


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The memory of a runner's cache, and its hits and evictions since the model was loaded."""

    limit_bytes: int = 0
    used_bytes: int = 0
    kept_bytes: int = 0
    """The part of the used bytes that may be evicted."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """The prompt tokens that didn't have to be computed."""
    evictions: int = 0


@dataclass(eq=False, slots=True)
class CachePage(Generic[A]):
    """Keys and values of up to PAGE_SIZE consecutive tokens."""

    keys: tuple[Key, ...]
    data: list[A]
    parent: CachePage[A] | None
    conversations: ConversationRefs = field(default_factory=ConversationRefs)
    children: dict[Key, list[CachePage[A]]] = field(default_factory=dict)
    """By their first key."""
    logits: dict[int, Logits] = field(default_factory=dict)
    """The logits after some of the keys, by the key's index: where prompts ended."""

    @property
    def nbytes(self) -> int:
        pages = sum(array.nbytes for array in self.data)
        return pages + sum(logits.nbytes for logits in self.logits.values())


@dataclass(frozen=True, slots=True)
class PrefixMatch(Generic[A]):
    """Pages that hold the first `tokens` tokens; the last page may match only in part."""

    pages: tuple[CachePage[A], ...]
    tokens: int


class PageTree(Generic[A]):
    """A radix tree for each namespace. Namespaces separate what must never be shared: owners and adapters."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, CachePage[A]] = {}
        self._lru: OrderedDict[CachePage[A], Hashable] = OrderedDict()
        """The namespace of each page, least recently used first."""
        self.nbytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._lru)

    def match(self, namespace: Hashable, keys: Sequence[Key]) -> PrefixMatch[A]:
        """The longest cached prefix of these keys. Counts as a use of its pages."""
        pages: list[CachePage[A]] = []
        tokens = 0
        page = self._roots.get(namespace)
        while page is not None and tokens < len(keys):
            child, common = _best_child(page, tuple(keys[tokens : tokens + PAGE_SIZE]))
            if child is None:
                break
            pages.append(child)
            tokens += common
            page = child if common == PAGE_SIZE else None
        self._touch(pages)
        return PrefixMatch(tuple(pages), tokens)

    def find_logits_page(self, namespace: Hashable, keys: Sequence[Key]) -> CachePage[A] | None:
        """The page that holds the last of these keys and the logits after it. Counts as a use of it."""
        match = self.match(namespace, keys)
        if not match.pages or match.tokens < len(keys):
            return None
        *before, last = match.pages
        size = (len(keys) - 1) % PAGE_SIZE + 1
        assert last.parent is not None
        for page in last.parent.children[last.keys[0]]:
            if page.keys[:size] == last.keys[:size] and size - 1 in page.logits:
                self._touch([*before, page])
                return page
        return None

    def path(self, namespace: Hashable, keys: Sequence[Key]) -> list[CachePage[A]]:
        """The root and the full pages below it that hold a prefix of these keys."""
        pages = self.match(namespace, keys).pages
        root = self._roots.setdefault(namespace, CachePage((), [], None))
        full = [page for page in pages[: len(keys) // PAGE_SIZE] if len(page.keys) == PAGE_SIZE]
        if full and full[-1].keys != tuple(keys[(len(full) - 1) * PAGE_SIZE : len(full) * PAGE_SIZE]):
            full.pop()
        return [root, *full]

    def insert(
        self,
        namespace: Hashable,
        path: list[CachePage[A]],
        pages: Iterable[tuple[tuple[Key, ...], list[A]]],
        conversation: str = "",
    ) -> bool:
        """Inserts the keys and data of consecutive pages below the path and appends them to the path. Returns False
        where the path was evicted."""
        if len(path) > 1 and path[-1] not in self._lru:
            return False
        try:
            for keys, data in pages:
                self._insert_page(namespace, path, keys, data, ConversationRefs(conversation))
        finally:
            self._touch(path[1:])
        return True

    def _insert_page(
        self,
        namespace: Hashable,
        path: list[CachePage[A]],
        keys: tuple[Key, ...],
        data: list[A],
        conversations: ConversationRefs,
    ) -> None:
        parent = path[-1]
        logits: dict[int, Logits] = {}
        for sibling in list(parent.children.get(keys[0], ())):
            if len(sibling.keys) < len(keys) and keys[: len(sibling.keys)] == sibling.keys:
                conversations.merge(sibling.conversations)  # the new page replaces the shorter one
                logits |= sibling.logits
                self._remove(sibling)
        page = CachePage(keys, data, parent, conversations, logits=logits)
        self._roots[namespace] = path[0]
        parent.children.setdefault(keys[0], []).append(page)
        self._lru[page] = namespace
        self.nbytes += page.nbytes
        path.append(page)

    def attach_logits(self, namespace: Hashable, keys: Sequence[Key], logits: Logits) -> None:
        """Caches the logits after these keys with the page that holds the last of them, if there is one."""
        match = self.match(namespace, keys)
        if match.pages and match.tokens == len(keys):
            match.pages[-1].logits[(len(keys) - 1) % PAGE_SIZE] = logits
            self.nbytes += logits.nbytes

    def find_child(self, path: list[CachePage[A]], keys: tuple[Key, ...]) -> CachePage[A] | None:
        """A page below the path that starts with these keys."""
        children = path[-1].children.get(keys[0], ())
        return next((child for child in children if child.keys[: len(keys)] == keys), None)

    def forget(self, conversation: str) -> None:
        """Drops the pages that only this conversation uses."""
        for page in list(self._lru):  # children come before their parents
            if page.conversations.release(conversation) and not page.children:
                self._remove(page)

    def evict(self) -> int:
        """Evicts the least recently used page. Returns its bytes, 0 where there is none.

        Using a page uses its ancestors too, so the least recently used page has no children.
        """
        if not self._lru:
            return 0
        page = next(iter(self._lru))
        self.evictions += 1
        return self._remove(page)

    def clear(self) -> None:
        while self._lru:
            self._remove(next(iter(self._lru)))

    def _touch(self, path: Sequence[CachePage[A]]) -> None:
        for page in reversed(path):
            self._lru.move_to_end(page)

    def _remove(self, page: CachePage[A]) -> int:
        assert not page.children, "a page with children is never the least recently used"
        namespace = self._lru.pop(page)
        parent = page.parent
        assert parent is not None
        siblings = parent.children[page.keys[0]]
        siblings.remove(page)
        if not siblings:
            del parent.children[page.keys[0]]
        if parent.parent is None and not parent.children:
            self._roots.pop(namespace, None)
        self.nbytes -= page.nbytes
        return page.nbytes


def _best_child(page: CachePage[A], keys: tuple[Key, ...]) -> tuple[CachePage[A] | None, int]:
    """The child that shares the longest prefix with these keys, and its length."""
    best, length = None, 0
    for child in page.children.get(keys[0], ()):
        if child.keys == keys:
            return child, len(keys)
        common = common_prefix_length(child.keys, keys)
        if common > length:
            best, length = child, common
    return best, length


class PrefixCache(Generic[A]):
    """Allocates slots, filled with the cached prefix of their sequence, and caches what they compute."""

    def __init__(self, layout: KVLayout[A], limit_bytes: int) -> None:
        self._layout = layout
        self._slots = SlotAllocator(layout, limit_bytes // POOL_SHARE)
        self.widens_pools = not layout.memory.on_host
        """On an accelerator moving slots is cheap, and one attention call a pool is not."""
        self.on_slots_moved: Callable[[], None] = lambda: None
        """Called after slots moved or were dropped: a cached batch holds references to the old pools."""
        self._pages: PageTree[A] = PageTree()
        self._limit_bytes = limit_bytes
        self._token_bytes = layout.bytes_per_token
        self._reserved_bytes = 0
        """The most that slots and pages took so far, in whole parts."""
        self._prompt_tokens = 0
        self._hit_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        cached = self._pages.nbytes
        return CacheStatistics(
            limit_bytes=self._limit_bytes,
            used_bytes=self._slots.nbytes + cached,
            kept_bytes=cached,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._pages.evictions,
        )

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits, if it runs alone."""
        return self._limit_bytes // self._token_bytes // MIN_CAPACITY * MIN_CAPACITY

    def check_capacity(self, tokens: int) -> None:
        """Raises CacheFull where so many tokens don't fit even alone."""
        if tokens > self.max_tokens:
            raise CacheFull(tokens, self.max_tokens)

    def count_cached(self, namespace: Hashable, keys: Sequence[Key]) -> int:
        """The length of the longest prefix of these keys in cached pages."""
        return self._pages.match(namespace, keys).tokens

    def allocate(self, namespace: Hashable, keys: Sequence[Key], tokens: int) -> tuple[Slot[A], int]:
        """A slot for so many tokens, and how many of these keys' tokens it already holds.

        Raises CacheFull when running sequences leave no memory for it.
        """
        assert tokens >= len(keys), "the keys must fit"
        match, evictions = self._pages.match(namespace, keys), self._pages.evictions
        location, held = self._slots.find_reusable(namespace, keys, default_capacity(tokens))
        if location is not None and (location[0].capacity >= tokens or held > match.tokens):
            slot = self._reuse(location, tokens, held)
        else:
            slot, held = self._allocate_new(tokens), 0
        if self._pages.evictions != evictions:
            match = self._pages.match(namespace, keys)
        for index, page in enumerate(match.pages):
            start = max(index * PAGE_SIZE, held)
            stop = min(match.tokens, index * PAGE_SIZE + len(page.keys))
            if start < stop:
                part = slice(start - index * PAGE_SIZE, stop - index * PAGE_SIZE)
                copy_all(self._layout.memory, slot.views(start, stop), [tensor[:, :, part] for tensor in page.data])
        cached = max(held, match.tokens)
        self._prompt_tokens += len(keys) + 1
        self._hit_tokens += cached
        return slot, cached

    def restore_logits(self, slot: Slot[A], namespace: Hashable, keys: Sequence[Key]) -> Logits | None:
        """The cached logits after all of these keys, or None. The slot, which holds the other keys, gets the last."""
        page = self._pages.find_logits_page(namespace, keys)
        if page is None:
            return None
        last, at = len(keys) - 1, (len(keys) - 1) % PAGE_SIZE
        copy_all(self._layout.memory, slot.views(last, last + 1), [tensor[:, :, at : at + 1] for tensor in page.data])
        self._hit_tokens += 1
        return page.logits[at]

    def grow(self, slot: Slot[A], tokens: int, used: int) -> None:
        """Makes room for so many tokens in all; other slots may move. Raises CacheFull."""
        if tokens <= slot.pool.capacity:
            return
        try:
            capacity = self._reserve(tokens)
        except CacheFull:
            self._grow_via_host(slot, tokens, used)
            return
        with self._out_of_memory_is_full(tokens):
            self._slots.grow(slot, capacity, used)

    def insert(self, slot: Slot[A], namespace: Hashable, keys: Sequence[Key], conversation: str = "") -> None:
        """Caches what the slot computed for these keys, as far as running sequences leave memory."""
        path = self._pages.path(namespace, keys)
        for page in path[1:]:
            page.conversations.add(conversation)
        first, end = (len(path) - 1) * PAGE_SIZE, len(keys)
        if first == end:
            return
        cached = self._pages.find_child(path, tuple(keys[first : first + PAGE_SIZE]))
        if cached is not None:
            cached.conversations.add(conversation)
            return
        others_bytes = self._pages.nbytes - first * self._token_bytes
        at_once = self._excess((end - first) * self._token_bytes) <= others_bytes  # without evicting the path
        step = end - first if at_once else PAGE_SIZE
        for start in range(first, end, step):
            stop = min(start + step, end)
            if not self._make_room_for_pages((stop - start) * self._token_bytes):
                return
            if not self._pages.insert(namespace, path, self._copy_pages(slot, keys, start, stop), conversation):
                return

    def _copy_pages(
        self, slot: Slot[A], keys: Sequence[Key], start: int, stop: int
    ) -> Iterator[tuple[tuple[Key, ...], list[A]]]:
        """The keys of the slot's pages and copies of their data."""
        views, clone = slot.views(start, stop), self._layout.memory.clone
        for at in range(start, stop, PAGE_SIZE):
            part = slice(at - start, at - start + PAGE_SIZE)
            yield tuple(keys[at : min(at + PAGE_SIZE, stop)]), [clone(view[:, :, part]) for view in views]

    def insert_logits(self, namespace: Hashable, keys: Sequence[Key], logits: Logits) -> None:
        """Caches the logits after these keys, if the keys are cached and there is memory."""
        small = logits.nbytes <= self._limit_bytes // LOGITS_SHARE
        missing = small and self._pages.find_logits_page(namespace, keys) is None
        if missing and self._make_room_for_pages(logits.nbytes):
            self._pages.attach_logits(namespace, keys, logits.copy())

    def free(self, slot: Slot[A], namespace: Hashable, keys: Sequence[Key], conversation: str = "") -> None:
        """Frees the slot, which holds these keys and can be reused for them."""
        self._slots.free(slot, namespace, keys, conversation)

    def forget(self, conversation: str) -> None:
        """Frees what was computed for this conversation and is used by no other."""
        self._slots.forget(conversation)
        self._pages.forget(conversation)

    def _allocate_new(self, tokens: int) -> Slot[A]:
        capacity = self._reserve(tokens)
        with self._out_of_memory_is_full(tokens):
            return self._slots.allocate_capacity(capacity)

    def _reuse(self, location: SlotLocation[A], tokens: int, used: int) -> Slot[A]:
        """The freed slot at this location, grown to so many tokens; its first `used` tokens stay."""
        slot, contents = self._slots.reuse(location)
        try:
            self.grow(slot, tokens, used)
        except CacheFull:
            self._slots.free(slot, *contents)
            raise
        return slot

    def _reserve(self, tokens: int) -> int:
        """Makes room for a slot; returns the capacity that fits. Slots in use may move."""
        default = default_capacity(tokens)
        widened = self._slots.widened_bytes(default) if self.widens_pools else 0
        if 0 < widened <= self._limit_bytes // WIDE_POOL_SHARE and self._excess(widened) <= 0:  # without evictions
            with suppress(CacheFull), self._out_of_memory_is_full(tokens):  # widening is only an optimisation
                self._slots.widen(default)
                self.on_slots_moved()
        for capacity in candidate_capacities(tokens):
            if self._make_room(self._slots.bytes_needed(capacity)):
                return capacity
        raise CacheFull(tokens, self.max_tokens)

    def _grow_via_host(self, slot: Slot[A], tokens: int, used: int) -> None:
        """Grows a slot where there is no memory for the old and the new one at once."""
        held = used * self._token_bytes
        host_bytes = available_bytes()
        freed = self._slots.exclusive_pool_bytes(slot)
        for capacity in candidate_capacities(tokens) if freed and (host_bytes is None or held < host_bytes) else ():
            if self._make_room(capacity * self._token_bytes - freed):
                self.on_slots_moved()
                with self._out_of_memory_is_full(tokens):
                    self._slots.grow_via_host(slot, capacity, used)
                return
        raise CacheFull(tokens, self.max_tokens)

    @contextmanager
    def _out_of_memory_is_full(self, tokens: int) -> Iterator[None]:
        """Raises CacheFull for out-of-memory errors: other processes may use the memory that was free at the start."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self._layout.memory.is_out_of_memory(error):
                raise
            raise CacheFull(tokens, self.max_tokens) from None

    def _make_room_for_pages(self, size: int) -> bool:
        """As `_make_room`; where pools are widened, pages leave them a part of the memory."""
        limit = self._limit_bytes - self._limit_bytes // WIDE_POOL_SHARE if self.widens_pools else self._limit_bytes
        while 0 < self._pages.nbytes > limit - size:
            self._pages.evict()
        return self._make_room(size)

    def _make_room(self, needed: int) -> bool:
        """Evicts pages until so many bytes are free. Evicts nothing and returns False where that isn't possible."""
        if self._excess(needed) > 0:
            self._compact_slots()
        if self._excess(needed) > self._pages.nbytes:
            return False
        while self._excess(needed) > 0:
            self._pages.evict()
        self._reserve_memory(self._limit_bytes + self._excess(needed))
        return True

    def _reserve_memory(self, nbytes: int) -> None:
        """Takes the memory of the cache from the device in large parts: each request to the device delays replies."""
        if nbytes > self._reserved_bytes:
            part = max(nbytes - self._reserved_bytes, self._limit_bytes // RESERVED_PARTS)
            part = min(part, self._limit_bytes - self._reserved_bytes)
            self._reserved_bytes += part
            with suppress(CacheFull), self._out_of_memory_is_full(0):  # it is only an optimisation
                self._layout.memory.reserve(part)

    def _compact_slots(self) -> None:
        """Frees the memory of unused slots."""
        self._slots.trim()
        self.on_slots_moved()
        while self.widens_pools and self._slots.narrow(-self._excess(0)):
            pass

    def _excess(self, needed: int) -> int:
        return self._slots.nbytes + self._pages.nbytes + needed - self._limit_bytes
