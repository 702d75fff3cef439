"""Decides what each pass of a diffusion model computes. Requests join and leave between steps.

A request reads its context in chunks, then denoises its reply block by block. A finished block is emitted and becomes a
part of the context. All blocks of a step share a pass, except where the rows of others would change the rounding.

The state of a reply follows from its tokens. A reply that was cut inside a block denoises that block again from its
start: if it comes out as the tokens that are there, it goes on behind them. Otherwise something else wrote them, and
the block is denoised around them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palaver.engines.core.generation import LocalGeneration, Outbox
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.request import RequestQueue
from palaver.engines.core.runner import as_engine_error
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.diffusion.block import Block, BlockRules
from palaver.engines.diffusion.config import DiffusionConfig, Visibility
from palaver.engines.diffusion.context_cache import CHUNK, CachedContext, ContextCache
from palaver.engines.diffusion.model import ContextKeyValues, DiffusionModel, PassSegment
from palaver.errors import PalaverError
from palaver.generation import AnswerRequested, Ended, Finish, Prefilled, Step

MAX_SHARED = 8
"""Blocks that share a pass where it must not change their rounding."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the blocks of a reply lie: one after the other from its first token on."""

    block_length: int
    room: int
    """The most tokens that the reply can have."""

    def start_of(self, position: int) -> int:
        return position // self.block_length * self.block_length

    def length_at(self, start: int) -> int:
        return min(self.block_length, self.room - start)


class DenoisingSequence:
    """One request: the state of its reply, what its context lacks, and the block that is denoised."""

    def __init__(
        self,
        generation: LocalGeneration,
        layout: BlockLayout,
        rules: BlockRules,
        make_reply: Callable[[Sequence[int]], ReplyState],
        make_block: Callable[[int, int, Sequence[int | None], BlockRules], Block] = Block,
    ) -> None:
        prompt = generation.prompt
        self.generation = generation
        self.layout = layout
        self.rules = rules
        self._make_block = make_block
        self.owner = prompt.owner
        self.space = (prompt.owner, prompt.adapter)
        start = layout.start_of(len(prompt.reply_ids))
        self.reply = make_reply(prompt.reply_ids[:start])
        self._given = deque(prompt.reply_ids[start:])
        """Tokens of the unfinished block that are there already, and have not come out again yet."""
        self.context = ContextKeyValues()
        self.unread: deque[Sequence[int]] = deque()
        """What the context lacks, in the pieces in which it is read."""
        self.prompt_logits: Tensor | None = None
        self.cached_tokens = 0
        self.prefilled = False
        self.block: Block | None = None

    def start_reading(self, context: ContextKeyValues) -> None:
        """Reads the prompt behind what is in the context, then the finished blocks of the reply, each by itself."""
        prompt = self.generation.prompt
        self.context = context
        self.unread.clear()
        for at in range(context.length, len(prompt.context_ids), CHUNK):
            self.unread.append(prompt.context_ids[at : at + CHUNK])
        finished = prompt.reply_ids[: self.layout.start_of(len(prompt.reply_ids))]
        for at in range(0, len(finished), self.layout.block_length):
            self.unread.append(finished[at : at + self.layout.block_length])

    @property
    def canvas(self) -> list[int]:
        """The whole text with its masked tokens, for a model whose blocks see everything."""
        assert self.block is not None
        before = (*self.generation.prompt.context_ids, *self.reply.token_ids[: self.block.start])
        end = self.block.start + len(self.block.tokens)
        assert self.rules.mask_id is not None
        return [*before, *self.block.ids, *[self.rules.mask_id] * (self.layout.room - end)]

    def start_block(self, given: Sequence[int] = ()) -> None:
        """Starts a block over: behind the tokens that are written, those that must come next or are given."""
        start = self.layout.start_of(len(self.reply.token_ids))
        known: list[int | None] = [*self.reply.token_ids[start:], *(given or self.reply.forced_ids)]
        known += self.generation.prompt.canvas[len(known) :]
        self.block = self._make_block(start, self.layout.length_at(start), known, self.rules)

    def finish_block(self) -> list[Step]:
        """Appends the tokens of the denoised block to the reply; returns the new ones.

        The block is started over if the reply needs another token somewhere: the closing of a thought, or a given one.
        """
        assert self.block is not None
        block, steps = self.block, list[Step]()
        for at in range(len(self.reply.token_ids) - block.start, len(block.tokens)):
            result, forced = block.results[at], self.reply.forced_id
            assert result is not None
            if at >= len(block.fixed):
                wanted = result.token_id if forced is None else forced
                if self._given and self._given[0] != wanted:
                    self.start_block(given=tuple(self._given))
                    return steps
                if wanted != result.token_id:
                    self.start_block()
                    return steps
            if self._given:
                self._given.popleft()
            else:
                steps.append(result)
            self.reply.append_token(result.token_id)
            if self.reply.ended is not None:
                return steps
        self.block = None
        return steps

    def answer_now(self) -> int:
        position = self.reply.answer_now(len(self.reply.token_ids) + len(self._given))
        if self.block is not None and self.reply.forced_ids and not self._given:
            self.start_block()
        return position


class DiffusionScheduler:
    def __init__(
        self,
        model: DiffusionModel | None,
        config: DiffusionConfig,
        outbox: Outbox,
        prepare: Callable[[LocalGeneration], DenoisingSequence],
        cache_bytes: int,
        limits: SchedulerLimits,
        batched: bool,
        approximate: bool = False,
    ) -> None:
        """`batched`: requests share all passes, whose rows change each other's rounding. Otherwise they share those
        which leave every bit as it is.

        `approximate`: the keys and values of the text before a block are computed in its first step, with all of the
        block masked, and kept until it is finished. For bidirectional models, of which nothing is reused otherwise.
        """
        self._model = model
        self._config = config
        self._outbox = outbox
        self._prepare = prepare
        self._limits = limits
        self._batched = batched
        self._approximate = approximate
        self._same_bits: dict[tuple[int, int], bool] = {}
        """Whether so many blocks of a length have the same bits in one pass as in a pass each."""
        self._cache = ContextCache(cache_bytes)
        self._running: dict[LocalGeneration, DenoisingSequence] = {}
        self._waiting: RequestQueue[DenoisingSequence] = RequestQueue(limits.max_waiting)

    @property
    def busy(self) -> bool:
        return bool(self._running) or bool(self._waiting)

    @property
    def counts(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

    @property
    def cache(self) -> ContextCache:
        return self._cache

    def submit(self, generation: LocalGeneration) -> None:
        try:
            sequence = self._prepare(generation)
            if sequence.reply.ended is not None:
                self._outbox.put(generation, sequence.reply.ended)
            else:
                self._waiting.add(sequence)
        except Exception as error:
            self._outbox.put(generation, as_engine_error(error))

    def cancel(self, generation: LocalGeneration) -> None:
        if generation in self._running:
            self._finish(self._running[generation], Ended(Finish.STOPPED))
        elif self._waiting.remove(generation):
            self._outbox.put(generation, Ended(Finish.STOPPED))

    def answer_now(self, generation: LocalGeneration) -> None:
        sequence = self._running.get(generation) or self._waiting.find(generation)
        if sequence is not None:
            self._outbox.put(generation, AnswerRequested(sequence.answer_now()))

    def forget(self, conversation: str) -> None:
        self._cache.forget(conversation)

    def drain(self) -> list[LocalGeneration]:
        """Drops all requests. Returns those that still need a final output."""
        unfinished = [*self._running, *self._waiting.generations]
        self._running.clear()
        self._waiting.clear()
        return unfinished

    def step(self) -> None:
        """Admits requests, reads a chunk of each context, and denoises every block that is ready by one step."""
        self._admit()
        self._read_contexts([sequence for sequence in self._running.values() if sequence.unread])
        ready = [sequence for sequence in self._running.values() if not sequence.unread]
        for sequence in ready:
            if sequence.block is None:
                sequence.start_block()
        open_blocks = [s for s in ready if s.block is not None and not s.block.done]
        self._denoise_blocks(open_blocks)
        for sequence in ready:
            if sequence.generation in self._running and sequence.block is not None and sequence.block.done:
                self._emit(sequence)

    def _admit(self) -> None:
        for sequence in list(self._waiting.sequences):
            if len(self._running) >= self._limits.max_running:
                break
            self._waiting.admit(sequence.generation)
            self._running[sequence.generation] = sequence
            self._start_reading(sequence)
            self._report_prefilled(sequence, sequence.context.length)
        for generation, queued in self._waiting.position_updates():
            self._outbox.put(generation, queued)

    def _start_reading(self, sequence: DenoisingSequence) -> None:
        if self._config.attention is Visibility.BLOCK_CAUSAL:
            prompt = sequence.generation.prompt
            sequence.start_reading(self._cache.take(sequence.space, prompt.context_ids))
            sequence.prompt_logits = sequence.context.last_logits

    def _read_contexts(self, sequences: Sequence[DenoisingSequence]) -> None:
        self._run(sequences, self._reading, self._read)

    def _denoise_blocks(self, sequences: Sequence[DenoisingSequence]) -> None:
        self._run(sequences, self._denoising, self._denoised)

    def _report_prefilled(self, sequence: DenoisingSequence, cached: int) -> None:
        """The tokens from the cache are known at once; the output follows when all of the prompt is read."""
        sequence.cached_tokens = cached
        if not sequence.unread:
            self._put_prefilled(sequence)

    def _put_prefilled(self, sequence: DenoisingSequence) -> None:
        if not sequence.prefilled:
            sequence.prefilled = True
            self._outbox.put(sequence.generation, Prefilled(len(sequence.generation.prompt), sequence.cached_tokens))

    def _run(
        self,
        sequences: Sequence[DenoisingSequence],
        segment: Callable[[DenoisingSequence], PassSegment],
        then: Callable[[DenoisingSequence, Tensor], None],
    ) -> None:
        """As few passes as their rounding allows. If a shared pass fails, each is tried alone."""
        assert self._model is not None
        for group in [list(sequences)] if self._batched else self._groups(sequences):
            parts: list[Tensor] | None = None
            if len(group) > 1:
                try:
                    parts = self._share_pass([segment(sequence) for sequence in group])
                except Exception as error:
                    as_engine_error(error)  # raises what the device doesn't survive
            if parts is not None:
                for sequence, logits in zip(group, parts, strict=True):
                    then(sequence, logits)
                continue
            for sequence in group:
                try:
                    (logits,) = self._model.run([segment(sequence)])
                    then(sequence, logits)
                except Exception as error:
                    self._finish(sequence, as_engine_error(error))

    def _groups(self, sequences: Sequence[DenoisingSequence]) -> list[list[DenoisingSequence]]:
        """Blocks of one length in a block-causal model may share a pass; everything else has its own."""
        by_length: dict[int, list[DenoisingSequence]] = {}
        groups: list[list[DenoisingSequence]] = []
        for sequence in sequences:
            if sequence.block is None or sequence.unread or self._config.attention is not Visibility.BLOCK_CAUSAL:
                groups.append([sequence])
                continue
            group = by_length.get(len(sequence.block.tokens))
            if group is None or len(group) == MAX_SHARED:
                group = by_length[len(sequence.block.tokens)] = []
                groups.append(group)
            group.append(sequence)
        return groups

    def _share_pass(self, segments: list[PassSegment]) -> list[Tensor] | None:
        """The logits of each; None where each needs a pass of its own.

        How a pass rounds follows from its number of rows. So the first pass with so many is compared with a pass for
        each: only where all bits are the same are such passes shared.
        """
        assert self._model is not None
        if self._batched:
            return self._model.run(segments)
        shape = len(segments), len(segments[0].ids)
        if shape not in self._same_bits:
            alone = [logits for segment in segments for logits in self._model.run([segment])]
            shared = self._model.run(segments)
            self._same_bits[shape] = all(map(torch.equal, alone, shared))
            return alone
        return self._model.run(segments) if self._same_bits[shape] else None

    def _reading(self, sequence: DenoisingSequence) -> PassSegment:
        ids = sequence.unread[0]
        return PassSegment(sequence.context, ids, slice(len(ids) - 1, len(ids)), causal=True)

    def _read(self, sequence: DenoisingSequence, logits: Tensor) -> None:
        sequence.unread.popleft()
        if sequence.context.length == len(sequence.generation.prompt.context_ids):
            sequence.prompt_logits = logits[-1]
        if not sequence.unread:
            self._put_prefilled(sequence)

    def _denoising(self, sequence: DenoisingSequence) -> PassSegment:
        """The rows that predict the tokens of the block."""
        block = sequence.block
        assert block is not None
        length, shift = len(block.tokens), int(self._config.shift)
        if self._config.attention is Visibility.BLOCK_CAUSAL:
            return PassSegment(sequence.context, block.ids, slice(0, length - shift))
        first = self._first_row(sequence)
        if not self._approximate:
            return PassSegment(ContextKeyValues(), sequence.canvas, slice(first, first + length))
        if block.step == 0:
            sequence.context = ContextKeyValues()
        kept = sequence.context.length
        return PassSegment(sequence.context, sequence.canvas[kept:], slice(first - kept, first - kept + length))

    def _first_row(self, sequence: DenoisingSequence) -> int:
        """Where the whole text has the row that predicts the first token of the block."""
        assert sequence.block is not None
        return len(sequence.generation.prompt.context_ids) + sequence.block.start - int(self._config.shift)

    def _denoised(self, sequence: DenoisingSequence, logits: Tensor) -> None:
        block = sequence.block
        assert block is not None
        if self._config.shift and self._config.attention is Visibility.BLOCK_CAUSAL:
            last = sequence.context.last_logits
            assert last is not None
            logits = torch.cat([last[None], logits])
        if self._approximate:
            sequence.context.length = self._first_row(sequence)
        block.denoise(logits)
        self._outbox.put(sequence.generation, block.draft())

    def _emit(self, sequence: DenoisingSequence) -> None:
        start = sequence.layout.start_of(len(sequence.reply.token_ids))
        for step in sequence.finish_block():
            self._outbox.put(sequence.generation, step)
        if sequence.block is None and self._config.attention is Visibility.BLOCK_CAUSAL:
            sequence.unread.append(sequence.reply.token_ids[start:])
        if sequence.reply.ended is not None:
            self._finish(sequence, sequence.reply.ended)

    def _finish(self, sequence: DenoisingSequence, output: Ended | PalaverError) -> None:
        del self._running[sequence.generation]
        self._waiting.record_finish()
        prompt = sequence.generation.prompt
        if sequence.prompt_logits is not None and sequence.context.length >= len(prompt.context_ids):
            context = sequence.context
            context.length = len(prompt.context_ids)
            self._cache.put(
                CachedContext(sequence.space, prompt.conversation, prompt.context_ids, context, sequence.prompt_logits)
            )
        self._outbox.put(sequence.generation, output)
