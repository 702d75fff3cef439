"""The runner for models on the library's own cache, one sequence after the other: whole states are cached at the end of
each prompt and reply. `hybrid_runner.py` runs most recurrent models, and batches them."""

from __future__ import annotations

import copy
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from palaver.engines.base import BY_BATCH, BY_CACHE
from palaver.engines.core.prefix_cache import CacheStatistics, ConversationRefs
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import DraftModel
from palaver.engines.core.sampler import Logits
from palaver.engines.torch.device_sampler import DeviceSampler
from palaver.engines.torch.media import MediaEncoder, SequenceMedia, inject_media
from palaver.engines.torch.model_runner import EXACT_CHUNK
from palaver.errors import CacheFull


class RecurrentState:
    """The model's own cache for one sequence."""

    def __init__(self, model: PreTrainedModel, media: MediaEncoder | None = None) -> None:
        self._model = model
        self._media = media
        self._tokens = 0
        self._cache = DynamicCache(config=model.config)
        self._cache_parameter = "past_key_values" if "past_key_values" in _parameters(model) else "cache_params"

    def feed(self, ids: Sequence[int], media: SequenceMedia | None = None) -> Tensor:
        """Computes these tokens; returns the logits after the last. `media`: those of the whole sequence."""
        batch = torch.tensor([list(ids)], device=self._model.device)
        options = {"use_cache": True, "logits_to_keep": 1, self._cache_parameter: self._cache}
        with inject_media(self._media, media, self._tokens, len(ids)) as positions:
            out = self._model(input_ids=batch, **positions, **options)
        self._tokens += len(ids)
        return last_logits(out)

    def copy(self) -> RecurrentState:
        twin = copy.copy(self)
        twin._cache = copy.deepcopy(self._cache)
        return twin

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(vars(self._cache)))


class StatelessModel:
    """For a model without a usable cache: computes the whole sequence at each token."""

    nbytes = 0

    def __init__(self, model: PreTrainedModel, media: MediaEncoder | None = None) -> None:
        self._model = model
        self._media = media
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int], media: SequenceMedia | None = None) -> Tensor:
        self._ids.extend(ids)
        with inject_media(self._media, media, 0, len(self._ids)) as positions:
            return last_logits(self._model(input_ids=torch.tensor([self._ids], device=self._model.device), **positions))

    def copy(self) -> StatelessModel:
        twin = StatelessModel(self._model, self._media)
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


class SizedState(Protocol):
    """The state after some tokens."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=SizedState)
ModelState = RecurrentState | StatelessModel
SnapshotKey = tuple[Hashable, tuple[Hashable, ...]]
"""The namespace and all keys up to the snapshot."""


@dataclass(frozen=True, slots=True)
class CacheAbilities:
    """What the model's own cache can do, as the probe found."""

    chunks: bool = True
    """Several tokens at once after the first pass."""
    copies: bool = True
    """A copy continues as the original would."""
    reason: str = ""
    """Why the model can't be run by TorchRunner."""


def max_cache_chunk(sequence: SequenceState) -> int:
    """How many tokens may be computed at once where the model's cache can't be continued by several."""
    return len(sequence.token_ids) if sequence.computed_tokens == 0 else 1


class SnapshotCache(Generic[S]):
    """Whole states by the keys that led to them; the least recently used are evicted first."""

    def __init__(self) -> None:
        self._snapshots: OrderedDict[SnapshotKey, tuple[S, int]] = OrderedDict()
        """The state and its bytes."""
        self._logits: dict[SnapshotKey, Logits] = {}
        """The logits after the keys of a snapshot, where a prompt ended there."""
        self._conversations: dict[SnapshotKey, ConversationRefs] = {}
        self.nbytes = 0
        self.evictions = 0

    def match(
        self, namespace: Hashable, keys: Sequence[Hashable], conversation: str | None = None
    ) -> tuple[S | None, int]:
        """The state after the longest prefix of these keys, and its length. The caller must copy the state.

        `conversation` is added to those that use the snapshot.
        """
        lengths = {len(prefix) for owner, prefix in self._snapshots if owner == namespace and len(prefix) <= len(keys)}
        for length in sorted(lengths, reverse=True):
            key = (namespace, tuple(keys[:length]))
            if key in self._snapshots:
                self._snapshots.move_to_end(key)
                if conversation is not None:
                    self._conversations[key].add(conversation)
                return self._snapshots[key][0], length
        return None, 0

    def logits(self, namespace: Hashable, keys: Sequence[Hashable]) -> Logits | None:
        """The logits after all of these keys, if they and the state are cached."""
        return self._logits.get((namespace, tuple(keys)))

    def insert(
        self,
        namespace: Hashable,
        keys: Sequence[Hashable],
        state: S,
        conversation: str = "",
        logits: Logits | None = None,
    ) -> None:
        key = (namespace, tuple(keys))
        conversations = self._conversations.get(key, ConversationRefs(conversation))
        conversations.add(conversation)
        logits = self._logits.get(key) if logits is None else logits
        self._remove(key)
        size = state.nbytes
        if logits is not None:
            self._logits[key] = logits
            size += logits.nbytes
        self._conversations[key] = conversations
        self._snapshots[key] = (state, size)
        self.nbytes += size

    def forget(self, conversation: str) -> None:
        """Drops the snapshots that only this conversation uses."""
        for key, conversations in list(self._conversations.items()):
            if conversations.release(conversation):
                self._remove(key)

    def evict(self) -> bool:
        if not self._snapshots:
            return False
        self._remove(next(iter(self._snapshots)))
        self.evictions += 1
        return True

    def _remove(self, key: SnapshotKey) -> None:
        _, size = self._snapshots.pop(key, (None, 0))
        self._conversations.pop(key, None)
        self._logits.pop(key, None)
        self.nbytes -= size


class SnapshotRunner:
    """Runs sequences one after the other, each with a state of its own."""

    def __init__(
        self,
        new_state: Callable[[], ModelState],
        limit_bytes: int,
        abilities: CacheAbilities,
        exact: bool = False,
        media: MediaEncoder | None = None,
    ) -> None:
        self.reuse = "snapshots" if abilities.copies else f"none: {abilities.reason}"
        self.mixed_tokens = None
        self.run_ahead = None
        self.resume_cached = None
        self.verify_drafts = None
        self.drafts_after_prompts = False
        self.draft_model: DraftModel | None = None
        self.uses_device = False
        self.supports_batching = False
        self.prefills_last_token = False
        self.max_replayed = 0
        self._new_state = new_state
        self._limit_bytes = limit_bytes
        self._abilities = abilities
        self._exact = exact
        self._snapshots: SnapshotCache[ModelState] = SnapshotCache()
        self._states: dict[SequenceState, ModelState] = {}
        self._encoder = media
        self._media: dict[SequenceState, SequenceMedia] = {}
        """The sequences with pictures or sounds."""
        self._sampler: DeviceSampler | None = None
        """Made with the first logits, for their device."""
        self.forward_seconds = 0.0
        self._prompt_tokens = 0
        self._hit_tokens = 0

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            limit_bytes=self._limit_bytes,
            used_bytes=self._running_bytes() + self._snapshots.nbytes,
            kept_bytes=self._snapshots.nbytes,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._snapshots.evictions,
        )

    def check_capacity(self, sequence: SequenceState) -> None:
        """The size of a state is unknown before it is computed."""

    def count_cached(self, sequence: SequenceState) -> int:
        return self._snapshots.match(sequence.space, sequence.prefix_keys[:-1])[1]

    def max_chunk(self, sequence: SequenceState) -> int | None:
        """How many tokens may be computed at once."""
        if not self._abilities.chunks:
            return max_cache_chunk(sequence)
        return EXACT_CHUNK if self._exact else None

    @property
    def exactness(self) -> str:
        """What the bits of a reply depend on. Sequences never share a pass, but they change each other's chunk sizes
        where those are not fixed."""
        return BY_CACHE if self._exact or not self._abilities.chunks else BY_BATCH

    def allocate(self, sequence: SequenceState) -> None:
        self._make_room()
        if self._states and self._running_bytes() > self._limit_bytes:
            raise CacheFull(len(sequence.token_ids), 0)
        sequence.cached_logits = self._snapshots.logits(sequence.space, sequence.prefix_keys)
        keys = sequence.prefix_keys[:-1] if sequence.cached_logits is None else sequence.prefix_keys
        state, tokens = self._snapshots.match(sequence.space, keys, sequence.conversation)
        self._states[sequence] = self._new_state() if state is None else state.copy()
        sequence.computed_tokens = sequence.cached_tokens = tokens
        if sequence.generation.prompt.media:
            assert self._encoder is not None, "media are refused by models that don't take them"
            try:
                self._media[sequence] = self._encoder.attach(sequence)
            except BaseException:
                del self._states[sequence]
                raise
        self._prompt_tokens += len(sequence.token_ids)
        self._hit_tokens += tokens

    def run(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool = True) -> Logits:
        rows = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.computed_tokens
            began = time.thread_time()
            ids = sequence.token_ids[start : start + count]
            rows.append(self._states[sequence].feed(ids, self._media.get(sequence)))
            self.forward_seconds += time.thread_time() - began
            sequence.computed_tokens += count
        logits = torch.stack(rows)
        if self._sampler is None:
            self._sampler = DeviceSampler(logits.device)
        return self._sampler.logits(logits)

    def needs_recompute(self, sequence: SequenceState) -> bool:
        return False

    def cache_prefix(self, sequence: SequenceState, tokens: int, logits: Logits) -> None:
        keys = sequence.prefix_keys[:tokens]
        if self._abilities.copies and self._snapshots.logits(sequence.space, keys) is None:
            state = self._states[sequence].copy()
            self._snapshots.insert(sequence.space, keys, state, sequence.conversation, logits.copy())
            self._make_room()

    def release(self, sequence: SequenceState) -> None:
        state = self._states.pop(sequence, None)
        self._media.pop(sequence, None)
        if state is not None and self._abilities.copies and sequence.computed_tokens:
            keys = sequence.prefix_keys[: sequence.computed_tokens]
            self._snapshots.insert(sequence.space, keys, state, sequence.conversation)
            self._make_room()

    def forget(self, conversation: str) -> None:
        self._snapshots.forget(conversation)

    def _make_room(self) -> None:
        while self._running_bytes() + self._snapshots.nbytes > self._limit_bytes and self._snapshots.evict():
            pass

    def _running_bytes(self) -> int:
        return sum(state.nbytes for state in list(self._states.values()))
