"""The runner for models whose state can't be cut: whole states are kept at the end of each prompt and reply."""

from __future__ import annotations

import copy
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from palaver.engines.base import BY_CACHE, BY_COMPANY
from palaver.engines.core.request import SequenceState
from palaver.engines.torch.prefix_cache import CacheStatistics, PageUsers
from palaver.errors import CacheFull


class RecurrentState:
    """What the model has computed of one sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._name = "past_key_values" if "past_key_values" in _parameters(model) else "cache_params"

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Computes these tokens too; the logits after the last."""
        batch = torch.tensor([list(ids)], device=self._model.device)
        out = self._model(input_ids=batch, use_cache=True, logits_to_keep=1, **{self._name: self._cache})
        return last_logits(out)

    def copy(self) -> RecurrentState:
        twin = copy.copy(self)
        twin._cache = copy.deepcopy(self._cache)
        return twin

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(vars(self._cache)))


class StatelessModel:
    """For a model without any cache: computes everything at each token."""

    nbytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> Tensor:
        self._ids.extend(ids)
        return last_logits(self._model(input_ids=torch.tensor([self._ids], device=self._model.device)))

    def copy(self) -> StatelessModel:
        twin = StatelessModel(self._model)
        twin._ids = list(self._ids)
        return twin


def last_logits(out: Any) -> Tensor:
    logits: Tensor = out.logits[0, -1]
    return logits


def _parameters(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a cache, whatever its layers are made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith("transformers.cache"):
        yield from _tensors(vars(value))


EXACT = 128
"""Prompt tokens of a sequence computed in a step of the exact mode."""

Place = tuple[Hashable, tuple[Hashable, ...]]
"""A space and all keys up to the snapshot."""


@dataclass(frozen=True, slots=True)
class CacheAbilities:
    """What a probe found that the model's own cache can do."""

    chunks: bool = True
    """Several tokens at once after the first pass."""
    copies: bool = True
    """A copy carries on as the original would."""
    why_not: str = ""


class SnapshotCache:
    """Whole states by what led to them; the least recently used go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, tuple[RecurrentState | StatelessModel, int]] = OrderedDict()
        self._logits: dict[Place, Tensor] = {}
        """Those after the keys of a snapshot, where a prompt ended there."""
        self._users: dict[Place, PageUsers] = {}
        self.nbytes = 0
        self.evicted = 0

    def match(
        self, space: Hashable, keys: Many[Hashable], user: str | None = None
    ) -> tuple[RecurrentState | StatelessModel | None, int]:
        """The state after most of these keys, and after how many. It belongs to the index: copy it.

        With `user` it counts as used by this one.
        """
        lengths = {len(kept) for owner, kept in self._kept if owner == space and len(kept) <= len(keys)}
        for length in sorted(lengths, reverse=True):
            place = (space, tuple(keys[:length]))
            if place in self._kept:
                self._kept.move_to_end(place)
                if user is not None:
                    self._users[place].add(user)
                return self._kept[place][0], length
        return None, 0

    def logits(self, space: Hashable, keys: Many[Hashable]) -> Tensor | None:
        """Those after all of these keys, where they and the state are kept."""
        return self._logits.get((space, tuple(keys)))

    def add(
        self,
        space: Hashable,
        keys: Many[Hashable],
        state: RecurrentState | StatelessModel,
        user: str = "",
        logits: Tensor | None = None,
    ) -> None:
        place = (space, tuple(keys))
        users = self._users.get(place, PageUsers(user))
        users.add(user)
        logits = self._logits.get(place) if logits is None else logits
        self._drop(place)
        size = state.nbytes
        if logits is not None:
            self._logits[place] = logits
            size += logits.nbytes
        self._users[place] = users
        self._kept[place] = (state, size)
        self.nbytes += size

    def forget(self, user: str) -> None:
        """Drops what nobody uses but this one."""
        for place, users in list(self._users.items()):
            if users.leave(user):
                self._drop(place)

    def evict(self) -> bool:
        if not self._kept:
            return False
        self._drop(next(iter(self._kept)))
        self.evicted += 1
        return True

    def _drop(self, place: Place) -> None:
        _, size = self._kept.pop(place, (None, 0))
        self._users.pop(place, None)
        self._logits.pop(place, None)
        self.nbytes -= size


class SnapshotRunner:
    """A state for each sequence, run one after the other."""

    def __init__(
        self,
        new: Callable[[], RecurrentState | StatelessModel],
        limit: int,
        abilities: CacheAbilities,
        exact: bool = False,
    ) -> None:
        self.reuse = "snapshots" if abilities.copies else f"none: {abilities.why_not}"
        self.batches = False
        self.closes = False
        self._new = new
        self._limit = limit
        self._abilities = abilities
        self._exact = exact
        self._snapshots = SnapshotCache()
        self._states: dict[SequenceState, RecurrentState | StatelessModel] = {}
        self.forward_seconds = 0.0
        self._prompt_tokens = 0
        self._hit_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            limit_bytes=self._limit,
            used_bytes=self._running_bytes() + self._snapshots.nbytes,
            kept_bytes=self._snapshots.nbytes,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._snapshots.evicted,
        )

    def check(self, sequence: SequenceState) -> None:
        """A state's size is known only once it is there."""

    def known(self, sequence: SequenceState) -> int:
        return self._snapshots.match(sequence.space, sequence.tokens[:-1])[1]

    def most(self, sequence: SequenceState) -> int | None:
        """How many tokens may be computed at once."""
        if not self._abilities.chunks:
            return len(sequence.tokens) if sequence.computed == 0 else 1
        return EXACT if self._exact else None

    @property
    def exactness(self) -> str:
        """Sequences never share a pass, but the others decide how a prompt is cut, unless all is cut alike."""
        return BY_CACHE if self._exact or not self._abilities.chunks else BY_COMPANY

    def begin(self, sequence: SequenceState) -> None:
        self._make_room()
        if self._states and self._running_bytes() > self._limit:
            raise CacheFull(len(sequence.tokens), 0)
        sequence.logits = self._snapshots.logits(sequence.space, sequence.tokens)
        keys = sequence.tokens[:-1] if sequence.logits is None else sequence.tokens
        state, tokens = self._snapshots.match(sequence.space, keys, sequence.conversation)
        self._states[sequence] = self._new() if state is None else state.copy()
        sequence.computed = sequence.cached = tokens
        self._prompt_tokens += len(sequence.tokens)
        self._hit_tokens += tokens

    def run(self, sequences: Many[SequenceState], counts: Many[int], asked: bool = True) -> Tensor:
        rows = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.computed
            began = time.thread_time()
            rows.append(self._states[sequence].feed(sequence.tokens[start : start + count]))
            self.forward_seconds += time.thread_time() - began
            sequence.computed += count
        return torch.stack(rows)

    def outgrown(self, sequence: SequenceState) -> bool:
        return False

    def keep(self, sequence: SequenceState, logits: Tensor) -> None:
        keys = sequence.tokens[: sequence.computed]
        if self._abilities.copies and self._snapshots.logits(sequence.space, keys) is None:
            state = self._states[sequence].copy()
            self._snapshots.add(sequence.space, keys, state, sequence.conversation, logits.clone())
            self._make_room()

    def end(self, sequence: SequenceState) -> None:
        state = self._states.pop(sequence, None)
        if state is not None and self._abilities.copies and sequence.computed:
            self._snapshots.add(sequence.space, sequence.tokens[: sequence.computed], state, sequence.conversation)
            self._make_room()

    def forget(self, conversation: str) -> None:
        self._snapshots.forget(conversation)

    def _make_room(self) -> None:
        while self._running_bytes() + self._snapshots.nbytes > self._limit and self._snapshots.evict():
            pass

    def _running_bytes(self) -> int:
        return sum(state.nbytes for state in list(self._states.values()))
