"""The KV cache: lanes for what runs, pages for what is kept, one bound on the memory of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palaver.engines.torch.kv_cache import (
    SMALLEST,
    KVLayout,
    Place,
    Slot,
    SlotAllocator,
    capacities_of,
    capacity_of,
    copy_all,
)
from palaver.engines.torch.memory import CPU, free_bytes, is_out_of_memory
from palaver.errors import CacheFull

COMMON = 16
"""What more conversations than this use belongs to all, so that no list of them grows without bound."""


class PageUsers:
    """The conversations a piece was computed or looked up for. A use without a name never ends."""

    __slots__ = ("_names",)

    def __init__(self, name: str = "") -> None:
        self._names: set[str] | None = {name} if name else None
        """None: everybody's."""

    def add(self, name: str) -> None:
        self.join(PageUsers(name))

    def join(self, others: PageUsers) -> None:
        if self._names is None or others._names is None:
            self._names = None
            return
        self._names |= others._names
        if len(self._names) > COMMON:
            self._names = None

    def leave(self, name: str) -> bool:
        """Whether that was the last one."""
        if self._names is None or name not in self._names:
            return False
        self._names.discard(name)
        return not self._names


PAGE = 32

Key = Hashable
"""What stands at a position: a token id, or the hash of the media whose placeholder it is."""


@dataclass(eq=False, slots=True)
class CachePage:
    keys: tuple[Key, ...]
    data: list[Tensor]
    parent: CachePage | None
    users: PageUsers = field(default_factory=PageUsers)
    children: dict[Key, list[CachePage]] = field(default_factory=dict)
    """By their first key."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Those after some of its keys, by their index: where prompts ended."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.data, *self.logits.values()))


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Pages that hold the first `tokens` tokens; of the last one perhaps only the beginning counts."""

    pages: tuple[CachePage, ...]
    tokens: int


class PageTree:
    """A tree for each space. A space keeps apart what may never be shared: owners and adapters."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, CachePage] = {}
        self._recent: OrderedDict[CachePage, Hashable] = OrderedDict()
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, space: Hashable, keys: Sequence[Key]) -> PrefixMatch:
        """The longest beginning of these keys that is kept. Counts as a use of it."""
        found: list[CachePage] = []
        tokens = 0
        page = self._roots.get(space)
        while page is not None and tokens < len(keys):
            child, common = _best_child(page, tuple(keys[tokens : tokens + PAGE]))
            if child is None:
                break
            found.append(child)
            tokens += common
            page = child if common == PAGE else None
        self._touch(found)
        return PrefixMatch(tuple(found), tokens)

    def ending(self, space: Hashable, keys: Sequence[Key]) -> CachePage | None:
        """The page that holds the last of these keys and the logits after it. Counts as a use of it."""
        match = self.match(space, keys)
        if not match.pages or match.tokens < len(keys):
            return None
        *before, last = match.pages
        size = (len(keys) - 1) % PAGE + 1
        assert last.parent is not None
        for page in last.parent.children[last.keys[0]]:
            if page.keys[:size] == last.keys[:size] and size - 1 in page.logits:
                self._touch([*before, page])
                return page
        return None

    def path(self, space: Hashable, keys: Sequence[Key]) -> list[CachePage]:
        """The root and the whole pages below it that hold the beginning of these keys."""
        pages = self.match(space, keys).pages
        root = self._roots.setdefault(space, CachePage((), [], None))
        whole = [page for page in pages[: len(keys) // PAGE] if len(page.keys) == PAGE]
        if whole and whole[-1].keys != tuple(keys[(len(whole) - 1) * PAGE : len(whole) * PAGE]):
            whole.pop()
        return [root, *whole]

    def add(
        self, space: Hashable, path: list[CachePage], keys: tuple[Key, ...], data: list[Tensor], user: str = ""
    ) -> bool:
        """Keeps a page below the path and adds it there. False when the path itself was evicted meanwhile."""
        parent = path[-1]
        if parent.parent is not None and parent not in self._recent:
            return False
        users = PageUsers(user)
        logits: dict[int, Tensor] = {}
        for sibling in list(parent.children.get(keys[0], ())):
            if len(sibling.keys) < len(keys) and keys[: len(sibling.keys)] == sibling.keys:
                users.join(sibling.users)  # the new page holds all of it
                logits |= sibling.logits
                self._forget(sibling)
        page = CachePage(keys, data, parent, users, logits=logits)
        self._roots[space] = path[0]
        parent.children.setdefault(keys[0], []).append(page)
        self._recent[page] = space
        self.nbytes += page.nbytes
        path.append(page)
        self._touch(path[1:])
        return True

    def attach(self, space: Hashable, keys: Sequence[Key], logits: Tensor) -> None:
        """Keeps the logits after these keys for as long as the page that holds the last of them, if there is one."""
        match = self.match(space, keys)
        if match.pages and match.tokens == len(keys):
            match.pages[-1].logits[(len(keys) - 1) % PAGE] = logits
            self.nbytes += logits.nbytes

    def below(self, path: list[CachePage], keys: tuple[Key, ...]) -> CachePage | None:
        """A page below the path that begins with these keys already."""
        children = path[-1].children.get(keys[0], ())
        return next((child for child in children if child.keys[: len(keys)] == keys), None)

    def forget(self, user: str) -> None:
        """Drops what nobody uses but this one."""
        for page in list(self._recent):  # those that others follow come after what follows them
            if page.users.leave(user) and not page.children:
                self._forget(page)

    def evict(self) -> int:
        """Drops the page that was not used for longest; returns its bytes, 0 when there is none.

        A page is used whenever one below it is, so the one that waited longest has none below it.
        """
        if not self._recent:
            return 0
        page = next(iter(self._recent))
        self.evicted += 1
        return self._forget(page)

    def clear(self) -> None:
        while self._recent:
            self._forget(next(iter(self._recent)))

    def _touch(self, path: Sequence[CachePage]) -> None:
        for page in reversed(path):
            self._recent.move_to_end(page)

    def _forget(self, page: CachePage) -> int:
        assert not page.children, "a page that others follow is never the oldest"
        space = self._recent.pop(page)
        parent = page.parent
        assert parent is not None
        siblings = parent.children[page.keys[0]]
        siblings.remove(page)
        if not siblings:
            del parent.children[page.keys[0]]
        if parent.parent is None and not parent.children:
            self._roots.pop(space, None)
        self.nbytes -= page.nbytes
        return page.nbytes


def _best_child(page: CachePage, keys: tuple[Key, ...]) -> tuple[CachePage | None, int]:
    """The child that shares most of these keys, and how many."""
    best, most = None, 0
    for child in page.children.get(keys[0], ()):
        if child.keys == keys:
            return child, len(keys)
        common = _common(child.keys, keys)
        if common > most:
            best, most = child, common
    return best, most


def _common(a: tuple[Key, ...], b: tuple[Key, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


BANK_SHARE = 64
"""A new bank of lanes takes at most this part of the memory, unless a single lane takes more."""
WIDE_SHARE = 8
"""The same for a bank that was widened."""

LOGITS_SHARE = 64
"""Logits after a prompt are kept where they take at most this part of the memory."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What the cache did since the model was loaded, and what it holds now."""

    limit_bytes: int = 0
    used_bytes: int = 0
    kept_bytes: int = 0
    """The part of the used bytes that may be evicted."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """The prompt tokens that didn't have to be computed."""
    evictions: int = 0


class PrefixCache:
    """Opens lanes that hold already what is known of a sequence, and keeps what they computed."""

    def __init__(self, layout: KVLayout, limit: int) -> None:
        self._layout = layout
        self._lanes = SlotAllocator(layout, limit // BANK_SHARE)
        self.widens = layout.device.type != "cpu"
        """Whether moving lanes costs next to nothing, and a call for each bank does not."""
        self.moved: Callable[[], None] = lambda: None
        """Is called when lanes have moved or gone: who holds on to where they were holds memory that nobody counts."""
        self._pages = PageTree()
        self._limit = limit
        self._prompt_tokens = 0
        self._hit_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        kept = self._pages.nbytes
        return CacheStatistics(
            limit_bytes=self._limit,
            used_bytes=self._lanes.nbytes + kept,
            kept_bytes=kept,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._pages.evicted,
        )

    def known(self, space: Hashable, keys: Sequence[Key]) -> int:
        """How many of the first tokens are kept."""
        return self._pages.match(space, keys).tokens

    def open(self, space: Hashable, keys: Sequence[Key], room: int) -> tuple[Slot, int]:
        """A lane with room for so many tokens, and how many of these keys' tokens it holds already.

        Raises CacheFull when running sequences leave no room for it.
        """
        assert room >= len(keys), "what is known must fit"
        match = self._pages.match(space, keys)
        place, warm = self._lanes.warmest(space, keys, capacity_of(room))
        if place is not None and (place[0].capacity >= room or warm > match.tokens):
            lane = self._reopen(place, room, warm)
            match = self._pages.match(space, keys)  # some may have gone to make room
        else:
            lane, warm = self._new(room), 0
            match = self._pages.match(space, keys)
        for index, page in enumerate(match.pages):
            start = max(index * PAGE, warm)
            stop = min(match.tokens, index * PAGE + len(page.keys))
            if start < stop:
                part = slice(start - index * PAGE, stop - index * PAGE)
                copy_all(lane.parts(start, stop), [tensor[:, :, part] for tensor in page.data])
        known = max(warm, match.tokens)
        self._prompt_tokens += len(keys) + 1
        self._hit_tokens += known
        return lane, known

    def recall(self, lane: Slot, space: Hashable, keys: Sequence[Key]) -> Tensor | None:
        """The logits after all of these keys, where they are kept; the lane, which holds the others, gets the last."""
        page = self._pages.ending(space, keys)
        if page is None:
            return None
        last, at = len(keys) - 1, (len(keys) - 1) % PAGE
        copy_all(lane.parts(last, last + 1), [tensor[:, :, at : at + 1] for tensor in page.data])
        self._hit_tokens += 1
        return page.logits[at]

    def grow(self, lane: Slot, tokens: int, used: int) -> None:
        """Makes room for so many tokens in all; other lanes may move. Raises CacheFull where there is none."""
        if tokens <= lane.bank.capacity:
            return
        try:
            capacity = self._reserve(tokens)
        except CacheFull:
            self._replace(lane, tokens, used)
            return
        with self._all_there_is(tokens):
            self._lanes.grow(lane, capacity, used)

    def keep(self, lane: Slot, space: Hashable, keys: Sequence[Key], user: str = "") -> None:
        """Keeps what the lane computed for these keys, as far as there is room beside what runs."""
        path = self._pages.path(space, keys)
        for page in path[1:]:
            page.users.add(user)
        for start in range((len(path) - 1) * PAGE, len(keys), PAGE):
            part = tuple(keys[start : start + PAGE])
            held = self._pages.below(path, part)
            if held is not None:
                held.users.add(user)
            if held is not None or not self._may_keep(len(part) * self._layout.token_bytes):
                return
            data = [view.clone(memory_format=torch.contiguous_format) for view in lane.parts(start, start + len(part))]
            if not self._pages.add(space, path, part, data, user):
                return

    def keep_logits(self, space: Hashable, keys: Sequence[Key], logits: Tensor) -> None:
        """Keeps the logits after these keys, as far as their values are kept and there is room."""
        small = logits.nbytes <= self._limit // LOGITS_SHARE
        if small and self._pages.ending(space, keys) is None and self._may_keep(logits.nbytes):
            self._pages.attach(space, keys, logits.clone())

    def close(self, lane: Slot, space: Hashable, keys: Sequence[Key], user: str = "") -> None:
        """Frees the lane, which holds these keys' values."""
        self._lanes.close(lane, space, keys, user)

    def forget(self, user: str) -> None:
        """Frees what was computed for this conversation and is used by no other."""
        self._lanes.forget(user)
        self._pages.forget(user)

    def check(self, tokens: int) -> None:
        """Raises CacheFull where so many tokens don't fit even alone."""
        if tokens > self.most_tokens:
            raise CacheFull(tokens, self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """The longest sequence that there is room for, if it is the only one."""
        return self._limit // self._layout.token_bytes // SMALLEST * SMALLEST

    def _new(self, room: int) -> Slot:
        capacity = self._reserve(room)
        with self._all_there_is(room):
            return self._lanes.open_cold(capacity)

    def _reopen(self, place: Place, room: int, used: int) -> Slot:
        """A lane that was left, with the `used` tokens it holds of what is needed."""
        lane, left = self._lanes.open_warm(place)
        try:
            self.grow(lane, room, used)
        except CacheFull:
            self._lanes.close(lane, *left)
            raise
        return lane

    def _reserve(self, tokens: int) -> int:
        """Makes room for a lane; returns the capacity that there is room for. Lanes in use may move."""
        usual = capacity_of(tokens)
        wider = self._lanes.wider(usual) if self.widens else 0
        if 0 < wider <= self._limit // WIDE_SHARE and self._excess(wider) <= 0:  # nothing has to go for it
            with suppress(torch.OutOfMemoryError):  # it was only to be quicker
                self._lanes.widen(usual)
                self.moved()
        for capacity in capacities_of(tokens):
            if self._make_room(self._lanes.needed(capacity)):
                return capacity
        raise CacheFull(tokens, self.most_tokens)

    def _replace(self, lane: Slot, tokens: int, used: int) -> None:
        """Grows a lane where there is no room for the old one and the new one at once."""
        held = used * self._layout.token_bytes
        spare = free_bytes(CPU)
        freed = self._lanes.bank_bytes(lane)
        for capacity in capacities_of(tokens) if freed and (spare is None or held < spare) else ():
            if self._make_room(capacity * self._layout.token_bytes - freed):
                self.moved()
                with self._all_there_is(tokens):
                    self._lanes.replace(lane, capacity, used)
                return
        raise CacheFull(tokens, self.most_tokens)

    @contextmanager
    def _all_there_is(self, tokens: int) -> Iterator[None]:
        """The memory may be smaller than it was taken for, where others use it too."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CacheFull(tokens, self.most_tokens) from None

    def _may_keep(self, size: int) -> bool:
        """Where banks are widened, a part of the memory is left to them."""
        most = self._limit - self._limit // WIDE_SHARE if self.widens else self._limit
        while 0 < self._pages.nbytes > most - size:
            self._pages.evict()
        return self._make_room(size)

    def _make_room(self, needed: int) -> bool:
        """Evicts until so many bytes are free, but nothing when even that would not do."""
        if self._excess(needed) > 0:
            self._tidy()
        if self._excess(needed) > self._pages.nbytes:
            return False
        while self._excess(needed) > 0:
            self._pages.evict()
        return True

    def _tidy(self) -> None:
        """Gives back what lanes hold in vain."""
        self._lanes.trim()
        self.moved()
        while self.widens and self._lanes.narrow(-self._excess(0)):
            pass

    def _excess(self, needed: int) -> int:
        return self._lanes.nbytes + self._pages.nbytes + needed - self._limit
