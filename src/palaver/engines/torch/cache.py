"""The KV cache: lanes for what runs, pages for what is kept, one bound on the memory of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from palaver.engines.torch.lanes import SMALLEST, Lane, Lanes, Layout, Place, capacities_of, capacity_of, copy_all
from palaver.engines.torch.memory import CPU, free_bytes, is_out_of_memory
from palaver.engines.torch.pages import PAGE, Key, Pages
from palaver.errors import CacheFull

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


class Cache:
    """Opens lanes that hold already what is known of a sequence, and keeps what they computed."""

    def __init__(self, layout: Layout, limit: int) -> None:
        self._layout = layout
        self._lanes = Lanes(layout, limit // BANK_SHARE)
        self.widens = layout.device.type != "cpu"
        """Whether moving lanes costs next to nothing, and a call for each bank does not."""
        self.moved: Callable[[], None] = lambda: None
        """Is called when lanes have moved or gone: who holds on to where they were holds memory that nobody counts."""
        self._pages = Pages()
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

    def open(self, space: Hashable, keys: Sequence[Key], room: int) -> tuple[Lane, int]:
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

    def recall(self, lane: Lane, space: Hashable, keys: Sequence[Key]) -> Tensor | None:
        """The logits after all of these keys, where they are kept; the lane, which holds the others, gets the last."""
        page = self._pages.ending(space, keys)
        if page is None:
            return None
        last, at = len(keys) - 1, (len(keys) - 1) % PAGE
        copy_all(lane.parts(last, last + 1), [tensor[:, :, at : at + 1] for tensor in page.data])
        self._hit_tokens += 1
        return page.logits[at]

    def grow(self, lane: Lane, tokens: int, used: int) -> None:
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

    def keep(self, lane: Lane, space: Hashable, keys: Sequence[Key], user: str = "") -> None:
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

    def close(self, lane: Lane, space: Hashable, keys: Sequence[Key], user: str = "") -> None:
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

    def _new(self, room: int) -> Lane:
        capacity = self._reserve(room)
        with self._all_there_is(room):
            return self._lanes.open_cold(capacity)

    def _reopen(self, place: Place, room: int, used: int) -> Lane:
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

    def _replace(self, lane: Lane, tokens: int, used: int) -> None:
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
