"""The runner for models whose cache can be cut at any token: reuse to the token, all sequences in one pass."""

from __future__ import annotations

import time
from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from palaver.engines.core.request import SequenceState
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.exact import ExactPasses
from palaver.engines.torch.kv_cache import KVLayout, Slot
from palaver.engines.torch.memory import ThreadCounts, is_out_of_memory
from palaver.engines.torch.prefix_cache import CacheStatistics, PrefixCache
from palaver.memory import give_back_unused

HEADROOM = 32
"""Room for so many tokens beyond the prompt is there from the start."""
EXACT = 128
"""Prompt tokens of a sequence computed in a step of the exact mode."""
SCORE_BYTES = {"cpu": 256 << 20}
"""What the scores of a pass may take, by device."""
MOST_SCORE_BYTES = 1 << 30


class Forward(Protocol):
    """Runs a plan: the logits after each sequence's last token."""

    def __call__(self, plan: ForwardBatch) -> Tensor: ...

    @property
    def pair_bytes(self) -> int:
        """What attention takes for each pair of a query and a key, where several tokens of a sequence are computed."""
        ...


class TorchRunner:
    def __init__(
        self,
        forward: Forward,
        layout: KVLayout,
        limit: int,
        context: int,
        threads: ThreadCounts,
        exact: ExactPasses | None = None,
        original_length: int | None = None,
    ) -> None:
        """`original_length`: a longer sequence takes other frequencies (`rope.LongRope`)."""
        self.reuse = "to the token"
        self.batches = True
        self.closes = layout.device.type == "cpu" and exact is None
        self._forward = forward
        self._device = layout.device
        self._cache = PrefixCache(layout, limit)
        self._context = context
        self._threads = threads
        self._exact = exact
        self._original_length = original_length
        self._lanes: dict[SequenceState, Slot] = {}
        self._long: set[SequenceState] = set()
        """Those begun with the frequencies for long texts."""
        self._last: ForwardBatch | None = None
        self._most_pairs = SCORE_BYTES.get(layout.device.type, MOST_SCORE_BYTES) // max(1, forward.pair_bytes)
        """Pairs of a query and a key in a pass that computes several tokens of a sequence."""
        self._cache.moved = self._forget_plan
        self.forward_seconds = 0.0

    @property
    def statistics(self) -> CacheStatistics:
        return self._cache.statistics

    def check(self, sequence: SequenceState) -> None:
        self._cache.check(len(sequence.tokens))

    def known(self, sequence: SequenceState) -> int:
        return self._cache.known(self._space(sequence, self._is_long(sequence)), sequence.tokens[:-1])

    def most(self, sequence: SequenceState) -> int | None:
        """Where it must not matter who else is there, neither may the size of chunks depend on it."""
        return None if self._exact is None else EXACT

    def begin(self, sequence: SequenceState) -> None:
        long = self._is_long(sequence)
        space, keys = self._space(sequence, long), sequence.tokens[:-1]
        lane, known = self._cache.open(space, keys, self._room(sequence))
        self._lanes[sequence] = lane
        sequence.logits = self._cache.recall(lane, space, sequence.tokens) if known == len(keys) else None
        sequence.computed = sequence.cached = known if sequence.logits is None else len(sequence.tokens)
        if long:
            self._long.add(sequence)

    def outgrown(self, sequence: SequenceState) -> bool:
        """As the library's own `generate`, which computes all keys again at the first token beyond the length."""
        return self._is_long(sequence) and sequence not in self._long

    def run(self, sequences: Many[SequenceState], counts: Many[int], asked: bool = True) -> Tensor:
        for sequence, count in zip(sequences, counts, strict=True):
            self._cache.grow(self._lanes[sequence], sequence.computed + count, sequence.computed)
        runs = [self._run(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        logits = self._computed(runs, asked)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed += count
        return logits

    def keep(self, sequence: SequenceState, logits: Tensor) -> None:
        keys = sequence.tokens[: sequence.computed]
        space = self._space(sequence, sequence in self._long)
        self._cache.keep(self._lanes[sequence], space, keys, sequence.conversation)
        self._cache.keep_logits(space, keys, logits)

    def end(self, sequence: SequenceState) -> None:
        lane = self._lanes.pop(sequence, None)
        if lane is not None:
            keys = sequence.tokens[: sequence.computed]
            space = self._space(sequence, sequence in self._long)
            self._long.discard(sequence)
            try:
                self._cache.keep(lane, space, keys, sequence.conversation)
            finally:
                self._cache.close(lane, space, keys, sequence.conversation)

    def forget(self, conversation: str) -> None:
        self._forget_plan()
        self._cache.forget(conversation)

    def _forget_plan(self) -> None:
        """It holds on to the lanes it was made for."""
        self._last = None

    def _run(self, sequence: SequenceState, count: int) -> SequenceChunk:
        start = sequence.computed
        ids = sequence.tokens[start : start + count]
        return sequence_chunk(self._lanes[sequence], start, ids, sequence in self._long)

    def _is_long(self, sequence: SequenceState) -> bool:
        return self._original_length is not None and len(sequence.tokens) > self._original_length

    def _space(self, sequence: SequenceState, long: bool) -> Hashable:
        """Keys of other frequencies are other keys."""
        return (sequence.space, "long") if long else sequence.space

    def _computed(self, runs: Many[SequenceChunk], asked: bool) -> Tensor:
        """Sequences of different frequencies don't share a pass."""
        both = [[i for i, run in enumerate(runs) if run.long is long] for long in (False, True)]
        outs = [self._together([runs[i] for i in places], asked) for places in both if places]
        if len(outs) == 1:
            return outs[0]
        order = torch.tensor([*both[0], *both[1]], device=self._device).argsort()
        return torch.cat(outs)[order] if asked else outs[0]

    def _together(self, runs: Many[SequenceChunk], asked: bool) -> Tensor:
        if self._exact is not None:
            began = time.thread_time()
            logits = self._exact.run(runs, asked)
            self.forward_seconds += time.thread_time() - began
            return logits
        several = any(len(run.ids) > 1 for run in runs)
        if several and _pairs(runs) > self._most_pairs:
            return self._halved(runs, asked)
        try:
            planned = self._plan(runs, asked)
            with self._threads.enough(planned.ids.shape[0] * planned.furthest):
                return self._pass(planned)
        except (RuntimeError, MemoryError) as error:
            if not several or not is_out_of_memory(error):
                raise
        self._most_pairs = _pairs(runs) // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        give_back_unused()
        return self._halved(runs, asked)

    def _halved(self, runs: Many[SequenceChunk], asked: bool) -> Tensor:
        """First the first halves of all that are several tokens, then the rest."""
        halves = [len(run.ids) // 2 for run in runs]
        firsts = [replace(run, ids=run.ids[:half]) for run, half in zip(runs, halves, strict=True) if half]
        self._together(firsts, False)
        rests = zip(runs, halves, strict=True)
        return self._together([replace(run, start=run.start + half, ids=run.ids[half:]) for run, half in rests], asked)

    def _plan(self, runs: Many[SequenceChunk], asked: bool) -> ForwardBatch:
        """The last one moved on, where the same sequences go on; chunks of a prompt in between leave it as it is."""
        if asked and self._last is not None and self._last.followed_by(runs):
            self._last.advance(runs)
            return self._last
        planned = build_batch(runs, self._device, asked=asked)
        if planned.steps:
            self._last = planned
        return planned

    def _pass(self, planned: ForwardBatch) -> Tensor:
        began = time.thread_time()
        logits = self._forward(planned)
        self.forward_seconds += time.thread_time() - began
        return logits

    def _room(self, sequence: SequenceState) -> int:
        most = min(self._context, self._cache.most_tokens)
        return min(len(sequence.tokens) + HEADROOM, max(most, len(sequence.tokens)))


def _pairs(runs: Many[SequenceChunk]) -> int:
    return sum(len(run.ids) * (run.start + len(run.ids)) for run in runs)
