"""Requests in the worker's thread: the queue of those that wait, fair between owners; the tokens of each; and how the
prompt tokens of a step are divided among them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.media import ProcessedMedia, integer_keys, prefix_keys
from palaver.engines.core.sampler import Logits
from palaver.engines.core.speculation import DraftLookup, ModelDrafts
from palaver.engines.core.token_masks import TokenHealing
from palaver.errors import QueueFull
from palaver.generation import Queued

ESTIMATE_WINDOW = 16
"""Recent finishes from which the queue's speed is estimated."""
MAX_POSITION_UPDATES = 64
"""Queue entries that are checked for a changed position in a step."""
BLOCK_SIZE = 64
"""Prompts are compared by hashes of their prefixes, one at each multiple of this many tokens."""


class SequenceState:
    """The tokens of one request, and how many of them the model has computed."""

    def __init__(
        self, generation: LocalGeneration, processor: LogitsProcessor, healing: TokenHealing | None = None
    ) -> None:
        self.generation = generation
        self.processor = processor
        self._healing = healing
        self._replayed = 0
        self.restored = False
        """Whether the processor has seen all tokens of a continued reply."""
        self.prompt_tokens = len(generation.prompt)
        self.token_ids = [*generation.prompt.context_ids, *generation.prompt.reply_ids]
        media = generation.prompt.media
        self.prefix_keys: list[Any] = prefix_keys(self.token_ids, media) if media else self.token_ids
        """What stands at each position, for the prefix cache: the token ids, or keys of media."""
        self.media: dict[str, ProcessedMedia] = {}
        """The media that are not computed yet, by key. The runner sets them."""
        self.unsplit: tuple[tuple[int, int], ...] = ()
        """Starts and ends of tokens that must be computed in one pass, because they see each other."""
        self.computed_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens that came from the prefix cache."""
        self.owner = generation.prompt.owner
        self.space = (generation.prompt.owner, generation.prompt.adapter)
        """Cached prefixes are shared only between sequences of the same space."""
        self.conversation = generation.prompt.conversation
        self.replays = False
        """Whether tokens of the reply that are not in the cache are computed one at a time, as they were generated."""
        self.prefilled = False
        """Whether the prompt, except for its last token, has been computed once."""
        self.prompt_cached = False
        """Whether the prompt is in the prefix cache."""
        self.cached_logits: Logits | None = None
        """The logits after all tokens, a batch of one row, if the prefix cache had them."""
        self.drafts: DraftLookup | None = None
        """Where drafts are verified: what it has to offer as one."""
        self.model_drafts = ModelDrafts()
        self.waits_for: SequenceState | None = None
        """While waiting: the running sequence that computes most of the tokens this one lacks."""

    @property
    def integer_keys(self) -> list[int]:
        """The prefix keys of all tokens, as integers."""
        return self.token_ids if self.prefix_keys is self.token_ids else integer_keys(self.prefix_keys)

    @property
    def pending_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def prefill_tokens(self) -> int:
        """How many of the pending tokens are computed in chunks, before the others are decoded one by one."""
        if self.replays:
            return max(0, len(self.generation.prompt.context_ids) - self.computed_tokens)
        return max(0, self.pending_tokens - 1)

    def start(self, max_replayed: int) -> None:
        """Call once its memory is allocated. `max_replayed`: as in `Runner`."""
        replayed = len(self.token_ids) - max(self.computed_tokens, len(self.generation.prompt.context_ids))
        self.replays = 1 < replayed <= max_replayed

    def restore(self, max_tokens: int) -> None:
        """Replays up to `max_tokens` more tokens of a continued reply."""
        reply_ids = self.generation.prompt.reply_ids[self._replayed : self._replayed + max_tokens]
        for token_id in reply_ids:
            self.processor.append_token(token_id)
        self._replayed += len(reply_ids)
        if self._replayed == len(self.generation.prompt.reply_ids):
            self.processor.start_healing(self._healing)
            self.restored = True

    def common_prefix(self, other: SequenceState) -> int:
        """How many prompt tokens both begin with. Takes a few comparisons even for long prompts."""
        ours, theirs = self._prefix_hashes, other._prefix_hashes
        blocks = bisect_left(range(min(len(ours), len(theirs))), True, key=lambda block: ours[block] != theirs[block])
        start = blocks * BLOCK_SIZE
        one = self.prefix_keys[start : min(start + BLOCK_SIZE, self.prompt_tokens)]
        two = other.prefix_keys[start : min(start + BLOCK_SIZE, other.prompt_tokens)]
        pairs = zip(one, two, strict=False)
        return start + next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))

    @cached_property
    def _prefix_hashes(self) -> list[int]:
        """One hash for each whole block of the prompt, over all tokens up to its end."""
        hashes: list[int] = []
        for end in range(BLOCK_SIZE, self.prompt_tokens + 1, BLOCK_SIZE):
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, *self.prefix_keys[end - BLOCK_SIZE : end])))
        return hashes

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.prefix_keys is not self.token_ids:
            self.prefix_keys.append(token_id)
        self.processor.append_token(token_id)


MaxChunk = Callable[[SequenceState], int | None]


def split_prefill_budget(
    prefilling: Sequence[SequenceState], budget: int, max_chunk: MaxChunk
) -> list[tuple[SequenceState, int]]:
    """How many prompt tokens of each sequence a step computes.

    The oldest sequence gets at least half of the budget, so that it completes; the shortest ones get the rest first.
    """
    if not prefilling:
        return []
    oldest = prefilling[0]
    shares = {oldest: min(oldest.prefill_tokens, max(1, budget // 2))}
    left = budget - shares[oldest]
    for sequence in [*sorted(prefilling[1:], key=lambda s: s.prefill_tokens), oldest]:
        if left > 0:
            more = min(sequence.prefill_tokens - shares.get(sequence, 0), left)
            shares[sequence] = shares.get(sequence, 0) + more
            left -= more
    return [(sequence, _chunk_size(count, sequence, max_chunk)) for sequence, count in shares.items() if count > 0]


def _chunk_size(count: int, sequence: SequenceState, max_chunk: MaxChunk) -> int:
    """A runner's limit replaces the budget: a model may need its prompt in one piece, or one token at a time."""
    limit = max_chunk(sequence)
    count = count if limit is None else min(limit, sequence.prefill_tokens)
    return align_chunk(sequence.computed_tokens, count, sequence.unsplit)


def align_chunk(start: int, count: int, unsplit: Sequence[tuple[int, int]]) -> int:
    """The size of a chunk that ends inside of no unsplit tokens: it ends before them or, if it starts with them, after
    them."""
    for first, end in unsplit:
        if first < start + count < end:
            return first - start if first > start else end - start
    return count


class QueuedSequence(Protocol):
    """What the queue needs to know about a request."""

    @property
    def generation(self) -> LocalGeneration: ...

    @property
    def owner(self) -> str: ...


S = TypeVar("S", bound=QueuedSequence)


@dataclass(slots=True)
class QueueEntry(Generic[S]):
    sequence: S
    round: int
    """In each round every owner is served once."""
    number: int
    """Arrival number: decides the order within a round."""


class RequestQueue(Generic[S]):
    """Round robin between owners, first come, first served within each owner.

    A request gets the round after its owner's last request, or after the current round. Once it waits, only owners who
    joined later with fewer requests can overtake it, each of them once a round.

    An owner may hold as many places as are left free: one alone gets half of the queue, two get a third each, and the
    last free place goes to an owner who has none.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._numbers = count()
        self._round = 0
        """The latest round from which a request was admitted."""
        self._by_owner: dict[str, dict[LocalGeneration, QueueEntry[S]]] = {}
        """Each owner's entries are in the order of their rounds."""
        self._preempted: dict[LocalGeneration, S] = {}
        """Requests that ran before: they are admitted first."""
        self._order: list[S] | None = []
        self._reported: dict[LocalGeneration, int] = {}
        """The last reported position of each request."""
        self._cursor = 0
        self._unchecked = 0
        """Entries from the cursor on whose positions have to be checked for changes."""
        self._finish_times: deque[float] = deque(maxlen=ESTIMATE_WINDOW)
        self.version = 0
        """Changes whenever an admission may succeed that failed before."""

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_owner.values()))

    @property
    def sequences(self) -> list[S]:
        """In the order of admission, if no other request joins."""
        if self._order is None:
            entries = [entry for line in self._by_owner.values() for entry in line.values()]
            entries.sort(key=lambda entry: (entry.round, entry.number))
            self._order = [*self._preempted.values(), *(entry.sequence for entry in entries)]
            self._unchecked = len(self._order)
        return self._order

    @property
    def generations(self) -> list[LocalGeneration]:
        return [sequence.generation for sequence in self.sequences]

    def add(self, sequence: S) -> None:
        """Raises QueueFull if the owner holds as many places as are free."""
        waiting = len(self)
        line = self._by_owner.get(sequence.owner, {})
        if len(line) >= self._limit - waiting:
            raise QueueFull(len(line) or waiting)
        if waiting == 0:
            self._finish_times.clear()  # the speed before the queue was empty predicts nothing
        last = next(reversed(line.values())).round if line else 0
        self._by_owner[sequence.owner] = line
        line[sequence.generation] = QueueEntry(sequence, max(last, self._round) + 1, next(self._numbers))
        self._invalidate()

    def requeue(self, sequence: S) -> None:
        """Puts a preempted request at the head of the queue."""
        self._preempted = {sequence.generation: sequence, **self._preempted}
        self._invalidate()

    def find(self, generation: LocalGeneration) -> S | None:
        entry = self._by_owner.get(generation.prompt.owner, {}).get(generation)
        return self._preempted.get(generation) if entry is None else entry.sequence

    def admit(self, generation: LocalGeneration) -> None:
        entry = self._pop(generation)
        if entry is not None:
            self._round = max(self._round, entry.round)

    def remove(self, generation: LocalGeneration) -> bool:
        """Removes a request without admitting it: later requests of its owner move up. Returns False if it does not
        wait."""
        if self.find(generation) is None:
            return False
        entry = self._pop(generation)
        if entry is not None:
            free = entry.round
            for later in self._by_owner.get(entry.sequence.owner, {}).values():
                if later.round > free:
                    later.round, free = free, later.round
        return True

    def clear(self) -> None:
        self._by_owner.clear()
        self._preempted.clear()
        self._reported.clear()
        self._invalidate()

    def record_finish(self) -> None:
        """Call when a running request has finished."""
        self._finish_times.append(self._clock())
        self.version += 1

    def position_updates(self) -> Iterator[tuple[LocalGeneration, Queued]]:
        """Requests whose position changed since it was last reported; a bounded number in each call."""
        order = self.sequences
        for _ in range(min(self._unchecked, MAX_POSITION_UPDATES)):
            self._cursor = self._cursor % len(order)
            generation, position = order[self._cursor].generation, self._cursor + 1
            self._cursor += 1
            self._unchecked -= 1
            if generation not in self._preempted and self._reported.get(generation) != position:
                self._reported[generation] = position
                yield generation, Queued(position, self._estimate(position))

    def _pop(self, generation: LocalGeneration) -> QueueEntry[S] | None:
        """None for a preempted request."""
        self._invalidate()
        self._reported.pop(generation, None)
        if self._preempted.pop(generation, None) is not None:
            return None
        owner = generation.prompt.owner
        entry = self._by_owner[owner].pop(generation)
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        return entry

    def _invalidate(self) -> None:
        self._order = None
        self.version += 1

    def _estimate(self, position: int) -> float | None:
        """Seconds until admission, from how often requests finished since the queue formed."""
        if len(self._finish_times) < 2:
            return None
        return position * (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)
