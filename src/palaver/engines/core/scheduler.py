"""Decides which sequences run in a step. Requests join and leave between steps; each fails or ends on its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from palaver.engines.core.generation import LocalGeneration, Outbox
from palaver.engines.core.request import RequestQueue, SequenceState, split_prefill_budget
from palaver.engines.core.runner import AheadPass, PassInterrupted, Runner, VerifyDrafts, as_engine_error
from palaver.engines.core.sampler import Logits, SampledStep
from palaver.engines.core.speculation import MAX_ROWS, OPENING_TOKENS, DraftLookup, PassCosts, ReplyOpenings
from palaver.errors import CacheFull, PalaverError
from palaver.generation import AnswerRequested, Ended, Finish, Prefilled

_log = logging.getLogger(__name__)

IDLE_CHUNKS = 4
"""Chunks of prompts computed in one step if no reply is decoding."""
RESTORE_TOKENS = 256
"""Tokens of continued replies that are replayed in a step: one or two milliseconds."""
LOOKAHEAD = 64
"""Waiting requests that are considered for admission in a step."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_running: int = 32
    max_waiting: int = 1024
    """Places in the queue. An owner may hold as many as are left free."""
    chunk_tokens: int = 128
    """Prompt tokens computed in a step: how much a long prompt delays the other replies."""


class Scheduler:
    def __init__(
        self,
        runner: Runner,
        outbox: Outbox,
        prepare: Callable[[LocalGeneration], SequenceState],
        limits: SchedulerLimits | None = None,
    ) -> None:
        self._runner = runner
        self._outbox = outbox
        self._prepare = prepare
        self._limits = limits or SchedulerLimits()
        self._running: dict[LocalGeneration, SequenceState] = {}
        self._waiting: RequestQueue[SequenceState] = RequestQueue(self._limits.max_waiting)
        self._restoring: list[SequenceState] = []
        """Waiting sequences whose reply state is still being replayed."""
        self._ended: list[SequenceState] = []
        """Sequences that ended in this step: their readers know it before what they computed is cached."""
        self._ahead: AheadPass | None = None
        """The pass that runs already, where the runner runs ahead."""
        self._pass_costs = PassCosts(waits_for_host=runner.run_ahead is not None)
        self._openings = ReplyOpenings()
        self._step_began = 0.0
        self.draft_tokens = self.accepted_tokens = 0
        """Tokens that were drafted so far, and those of them that were sampled, too."""
        self._full_version = -1
        """The queue's version at which the cache was full. Admission is tried again once the version changes."""

    @property
    def busy(self) -> bool:
        return bool(self._running) or bool(self._waiting)

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of running and of waiting requests."""
        return len(self._running), len(self._waiting)

    def submit(self, generation: LocalGeneration) -> None:
        try:
            sequence = self._prepare(generation)
            sequence.restore(RESTORE_TOKENS)
            ended = sequence.processor.reply.ended
            if ended is not None:
                self._outbox.put(generation, ended)
                return
            self._runner.check_capacity(sequence)
            self._waiting.add(sequence)
        except Exception as error:
            self._outbox.put(generation, as_engine_error(error))
            return
        if not sequence.restored:
            self._restoring.append(sequence)

    def cancel(self, generation: LocalGeneration) -> None:
        if generation in self._running:
            self._finish(self._running[generation], Ended(Finish.STOPPED))
            self._release_ended()
        elif self._waiting.remove(generation):
            self._outbox.put(generation, Ended(Finish.STOPPED))

    def answer_now(self, generation: LocalGeneration) -> None:
        sequence = self._running.get(generation) or self._waiting.find(generation)
        if sequence is not None:
            position = len(sequence.token_ids) - len(generation.prompt.context_ids)
            self._outbox.put(generation, AnswerRequested(sequence.processor.reply.answer_now(position)))

    def forget(self, conversation: str) -> None:
        self._openings = ReplyOpenings()  # no conversation is noted there: replies show soon what they begin with
        self._runner.forget(conversation)
        if self._runner.draft_model is not None:
            self._runner.draft_model.forget(conversation)

    def drain(self) -> list[LocalGeneration]:
        """Drops all requests. Returns those that still need a final output."""
        unfinished = [*self._running, *self._waiting.generations]
        self._running.clear()
        self._waiting.clear()
        self._restoring.clear()
        self._ahead = None
        return unfinished

    def step(self) -> None:
        """Admits requests, then computes chunks of prompts and the next token of every reply."""
        self._step_began = self._now()
        if self._waiting:
            if self._restoring:
                self._restore()
            self._admit()
        self._decode_cached()
        if not self._decode_mixed():
            self._decode_apart()
        if self._ended:
            self._outbox.flush()
            self._release_ended()

    def _decode_mixed(self) -> bool:
        """One pass for all. Returns False, with nothing computed, where some sequences need passes of their own."""
        if self._runner.mixed_tokens is None:
            return False
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._decode_ahead(ahead):
            return True
        shares = self._share_pass(())
        if shares is None:
            return False
        sequences, counts = [sequence for sequence, _ in shares], [count for _, count in shares]
        self._decode_plainly_or_with_drafts(sequences, counts)
        return True

    def _share_pass(self, sequences: Sequence[SequenceState]) -> list[tuple[SequenceState, int]] | None:
        """What one pass computes of all other running sequences beside the next token of each of these: the sequences
        and the numbers of their tokens. None where one of them needs a pass of its own."""
        if len(sequences) == len(self._running):
            return []
        if self._runner.mixed_tokens is None:
            return None
        known = set(sequences)
        others = [sequence for sequence in self._running.values() if sequence not in known]
        decoding = [sequence for sequence in others if sequence.pending_tokens and not sequence.prefill_tokens]
        prefilling = [sequence for sequence in others if sequence.prefill_tokens]
        replies = len(sequences) + len(decoding)
        budget = min(self._runner.mixed_tokens(others, replies), self._limits.chunk_tokens)
        if not budget or (not replies and sum(sequence.prefill_tokens for sequence in prefilling) > budget):
            return None
        chunks = split_prefill_budget(prefilling, budget, self._runner.max_chunk)
        return [(s, 1) for s in decoding] + [(s, n + 1 if n == s.prefill_tokens else n) for s, n in chunks]

    def _decode_apart(self) -> None:
        """A pass for a chunk of prompts, then one for the next tokens."""
        prefilling = [sequence for sequence in self._running.values() if sequence.prefill_tokens]
        if prefilling and self._prefill(prefilling):
            return
        decoding = [s for s in self._running.values() if s.pending_tokens and not s.prefill_tokens]
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._decode_ahead(ahead)
        self._decode_plainly_or_with_drafts(decoding, [1] * len(decoding))

    def _decode_plainly_or_with_drafts(self, sequences: list[SequenceState], counts: list[int]) -> None:
        plain = all(count == 1 for count in counts)
        if (
            plain
            and self._runner.verify_drafts is not None
            and self._decode_drafts(sequences, self._runner.verify_drafts)
        ):
            return
        began = self._now()
        self._decode(sequences, counts)
        if sequences and plain:
            self._pass_costs.record_plain(len(sequences), self._now() - began)

    def _now(self) -> float:
        """Seconds, by which passes are compared: of this thread, or of all where a device computes."""
        return time.perf_counter() if self._runner.uses_device else time.thread_time()

    def _restore(self) -> None:
        """Replays a bounded number of tokens of continued replies."""
        self._restoring = [s for s in self._restoring if self._waiting.find(s.generation) is not None]
        for sequence in self._restoring:
            try:
                sequence.restore(max(1, RESTORE_TOKENS // len(self._restoring)))
            except Exception as error:
                self._reject(sequence, as_engine_error(error))
                continue
            ended = sequence.processor.reply.ended
            if ended is not None:
                self._reject(sequence, ended)
        self._restoring = [sequence for sequence in self._restoring if not sequence.restored]

    def _reject(self, sequence: SequenceState, output: Ended | PalaverError) -> None:
        """Removes a waiting request from the queue with its final output."""
        self._waiting.remove(sequence.generation)
        self._outbox.put(sequence.generation, output)

    def _admit(self) -> None:
        if len(self._running) < self._limits.max_running and self._waiting.version != self._full_version:
            prefilling = [sequence for sequence in self._running.values() if sequence.pending_tokens > 1]
            for sequence in self._waiting.sequences[:LOOKAHEAD]:
                if len(self._running) >= self._limits.max_running:
                    break
                if not sequence.restored or self._waits_for_prefix(sequence, prefilling):
                    continue
                if not self._start(sequence):
                    self._full_version = self._waiting.version
                    break
                if sequence.pending_tokens > 1 and sequence.generation in self._running:
                    prefilling.append(sequence)
        for generation, queued in self._waiting.position_updates():
            self._outbox.put(generation, queued)

    def _start(self, sequence: SequenceState) -> bool:
        """Moves a request from waiting to running. Returns False if the cache has no room yet."""
        try:
            self._runner.allocate(sequence)
        except Exception as error:
            failure = as_engine_error(error)
            if isinstance(failure, CacheFull) and self._running:
                return False
            self._reject(sequence, failure)
            return True
        sequence.start(self._runner.max_replayed)
        self._waiting.admit(sequence.generation)
        self._running[sequence.generation] = sequence
        self._report_prefilled(sequence)
        return True

    def _waits_for_prefix(self, sequence: SequenceState, prefilling: list[SequenceState]) -> bool:
        """Whether a running prefill computes most of the tokens that the request lacks: a shared prefix is computed
        once."""
        source = sequence.waits_for
        if source is not None and source.generation in self._running and source.pending_tokens > 1:
            return True
        sequence.waits_for = None
        shared = [(sequence.common_prefix(other), other) for other in prefilling if other.space == sequence.space]
        common, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        if best is None or 2 * common < len(sequence.token_ids):
            return False
        common = min(common, best.prompt_tokens - 1)
        cached = self._runner.count_cached(sequence)
        if common > cached and 2 * (common - cached) >= len(sequence.token_ids) - cached:
            sequence.waits_for = best
        return sequence.waits_for is not None

    def _prefill(self, prefilling: list[SequenceState]) -> bool:
        """Computes a chunk of prompts. Returns whether it completed all of them and decoded their first tokens too."""
        delays_others = len(prefilling) < len(self._running)
        budget = self._limits.chunk_tokens if delays_others else self._limits.chunk_tokens * IDLE_CHUNKS
        shares = split_prefill_budget(prefilling, budget, self._runner.max_chunk)
        sequences, counts = [sequence for sequence, _ in shares], [count for _, count in shares]
        completes = sum(counts) == sum(sequence.prefill_tokens for sequence in prefilling)
        last_too = self._runner.prefills_last_token and not any(sequence.replays for sequence in prefilling)
        if completes and not delays_others and last_too:
            if not self._decode_openings(sequences):
                self._decode(sequences, [count + 1 for count in counts])
            return True
        self._forward(sequences, counts, need_logits=False)
        for sequence in sequences:
            if sequence.generation in self._running:
                self._report_prefilled(sequence)
        return False

    def _report_prefilled(self, sequence: SequenceState) -> None:
        if not sequence.prefilled and sequence.pending_tokens <= 1:
            sequence.prefilled = True
            self._outbox.put(sequence.generation, Prefilled(sequence.prompt_tokens, sequence.cached_tokens))

    def _decode(self, sequences: list[SequenceState], counts: list[int]) -> None:
        """Computes the next tokens of each sequence (`counts`), then samples the one after its last."""
        last = [sequence.pending_tokens == count for sequence, count in zip(sequences, counts, strict=True)]
        for computed, logits in self._forward(sequences, counts, need_logits=any(last)):
            for sequence in computed:
                self._report_prefilled(sequence)
            rows = [row for row, sequence in enumerate(computed) if not sequence.pending_tokens]
            if rows:
                logits = logits if len(rows) == len(computed) else logits.select(rows)
                self._emit_all([computed[row] for row in rows], logits)

    def _decode_drafts(self, sequences: list[SequenceState], verify: VerifyDrafts) -> bool:
        """Computes the next token of each sequence and drafts behind them, then samples as many tokens as the drafts
        hold. Returns False, with nothing done, if there are no drafts."""
        most = MAX_ROWS // len(sequences) - 1 if sequences and self._pass_costs.knows_plain(len(sequences)) else 0
        if most < 1:
            return False
        for sequence in sequences:
            if sequence.pending_tokens != 1 or not sequence.prompt_cached:
                return False
        openings = [self._expected_opening(sequence, most) for sequence in sequences]
        drafts = [opening or self._propose(one, most) for one, opening in zip(sequences, openings, strict=True)]
        looked_up = {
            one for one, draft, opening in zip(sequences, drafts, openings, strict=True) if draft and not opening
        }
        by_model = self._ask_draft_model(sequences, drafts, most)
        if not any(drafts):
            return False
        began = self._now()
        verified = self._verify(sequences, drafts, verify)
        if verified is None:
            return False
        self._record_drafts(verified, looked_up, by_model, began)
        return True

    def _ask_draft_model(
        self, sequences: list[SequenceState], drafts: list[Sequence[int]], most: int
    ) -> Collection[SequenceState]:
        """Fills in drafts where there are none. Returns the sequences that have one now."""
        model, costs = self._runner.draft_model, self._pass_costs
        if model is None:
            return ()
        lengths = self._model_lengths(sequences, most)
        lengths = [0 if draft else length for draft, length in zip(drafts, lengths, strict=True)]
        if not any(lengths):
            return ()
        began = self._now()
        found: dict[int, Sequence[int]] = {}
        try:
            proposed = model.propose(sequences, lengths)
            found = {place: draft for place, draft in enumerate(proposed) if draft}
        except Exception as error:
            as_engine_error(error)  # raises where the device is lost; else it goes on without drafts
        followed = True
        for place, draft in found.items():
            one = sequences[place]
            followed &= len(one.token_ids) - one.model_drafts.tokens <= MAX_ROWS
            one.model_drafts.tokens, drafts[place] = len(one.token_ids), draft
        if found and followed:
            costs.record_model(len(sequences), max(map(len, found.values())), self._now() - began)
        return {sequences[place] for place in found}

    def _decode_openings(self, sequences: list[SequenceState]) -> bool:
        """Computes prompts to their ends and behind them what the replies are expected to begin with, then samples as
        `_decode_drafts`. Returns False, with nothing done, if nothing is expected."""
        verify, most = self._runner.verify_drafts, MAX_ROWS // len(sequences) - 1
        if verify is None or not self._runner.drafts_after_prompts or most < 1:
            return False
        drafts = [self._expected_opening(sequence, most) for sequence in sequences]
        return any(drafts) and self._verify(sequences, drafts, verify) is not None

    def _verify(
        self, sequences: list[SequenceState], drafts: Sequence[Sequence[int]], verify: VerifyDrafts
    ) -> _VerifiedPass | None:
        """Computes the pending tokens of each sequence and its draft, then samples as many tokens as the drafts hold.
        Returns None, with nothing done, if the drafts can't be computed."""
        try:
            logits = verify(sequences, drafts)
        except Exception as error:
            as_engine_error(error)  # raises where the device is lost; else it is tried without drafts
            return None
        self.draft_tokens += sum(map(len, drafts))  # before the replies may end
        first_rows = accumulate((1 + len(draft) for draft in drafts), initial=0)
        verified = [_Verified.of(*one, logits) for one in zip(sequences, drafts, first_rows, strict=False)]
        computed = [
            (one.sequence, one.sequence.computed_tokens, logits.row(one.first_row))
            for one in verified
            if not one.sequence.prompt_cached
        ]
        for sequence in sequences:
            self._report_prefilled(sequence)
        ended: list[tuple[_Verified, int]] = []
        first_sampled, accepted = 0.0, 0
        while verified:
            steps = _sample_verified(logits, verified, accepted)
            if not accepted:
                first_sampled = self._now()
            held = [self._accept(*one, accepted) for one in zip(verified, steps, strict=True)]
            ended += [(one, accepted) for one, holds in zip(verified, held, strict=True) if not holds]
            verified = [one for one, holds in zip(verified, held, strict=True) if holds]
            accepted += 1
        self._cache_prompts(computed)
        return _VerifiedPass(ended, first_sampled)

    def _propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        """A draft of at most so many tokens from the text so far."""
        most = _within_limit(sequence, most)
        return self._lookup(sequence).propose(most, self._pass_costs, len(self._running)) if most > 0 else ()

    def _expected_opening(self, sequence: SequenceState, most: int) -> Sequence[int]:
        """What the first tokens of the reply are expected to be, behind those that are there: at most so many."""
        prompt = sequence.generation.prompt
        begun = len(sequence.token_ids) - len(prompt.context_ids)
        if begun >= OPENING_TOKENS or prompt.reply_ids:
            return ()
        opening = self._openings.expected(sequence.space, prompt.context_ids)
        if opening[:begun] != tuple(sequence.token_ids[len(prompt.context_ids) :]):
            return ()
        return opening[begun:][: _within_limit(sequence, most)]

    @staticmethod
    def _lookup(sequence: SequenceState) -> DraftLookup:
        if sequence.drafts is None:
            sequence.drafts = DraftLookup(sequence.token_ids)
        return sequence.drafts

    def _accept(self, verified: _Verified, step: SampledStep, accepted: int) -> bool:
        """Emits the token after so many accepted ones. Returns whether the draft holds it, too."""
        sequence, draft = verified.sequence, verified.draft
        self._emit(sequence, step)
        runs = self._running.get(sequence.generation) is sequence
        holds = runs and accepted < len(draft) and sequence.token_ids[-1] == draft[accepted]
        if holds:
            sequence.computed_tokens += 1
            self.accepted_tokens += 1
        return holds

    def _record_drafts(
        self,
        verified: _VerifiedPass,
        looked_up: Collection[SequenceState],
        by_model: Collection[SequenceState],
        began: float,
    ) -> None:
        """`looked_up`, `by_model`: the sequences whose drafts come from their text, and from the draft model."""
        costs, now = self._pass_costs, self._now()
        ended, first_sampled = verified.ended, verified.first_sampled
        drafted, accepted = sum(len(one.draft) for one, _ in ended), sum(count for _, count in ended)
        if self._runner.run_ahead is None:
            costs.record_drafting(len(ended), drafted, first_sampled - began, accepted, now - first_sampled)
        else:  # without drafts the device would not wait for anything of this step
            costs.record_drafting(len(ended), drafted, now - self._step_began)
        extra, sampling = costs.extra(len(ended), drafted), costs.sampling(len(ended), drafted)
        for one, count in ended:
            if one.sequence.drafts is not None and one.sequence in looked_up:
                one.sequence.drafts.record(len(one.draft), count, extra, sampling)
            elif one.sequence in by_model:
                one.sequence.model_drafts.record(len(one.draft), count)

    def _decode_ahead(self, ahead: AheadPass) -> bool:
        """Samples the next tokens of those sequences of a pass that still run. Returns whether there are any."""
        for sequence, _ in ahead.prompts:
            if self._running.get(sequence.generation) is sequence:
                self._report_prefilled(sequence)
        rows = [row for row, s in enumerate(ahead.sequences) if self._is_ahead(s) and row not in ahead.dropped]
        if not rows or ahead.logits is None:
            return False
        whole = len(rows) == len(ahead.sequences)
        self._emit_all([ahead.sequences[row] for row in rows], ahead.logits if whole else ahead.logits.select(rows))
        if whole and not ahead.prompts:
            self._pass_costs.record_plain(len(rows), time.perf_counter() - ahead.began)
        return True

    def _is_ahead(self, sequence: SequenceState) -> bool:
        return self._running.get(sequence.generation) is sequence and sequence.pending_tokens == 0

    def _emit_all(self, sequences: list[SequenceState], logits: Logits, may_draft: bool = True) -> None:
        """Samples and emits a token of each sequence. Where the runner runs ahead, the next pass starts before that.
        `may_draft`: whether it may wait for drafts instead."""
        computed = [
            (one, one.computed_tokens, logits.row(row)) for row, one in enumerate(sequences) if not one.prompt_cached
        ]
        ahead = None
        if self._runner.run_ahead is not None:  # the next pass may take the place of the logits
            self._cache_prompts(computed)
        if self._runner.run_ahead is not None and not (may_draft and self._expects_drafts(sequences)):
            prompts = self._share_pass(sequences)
            if prompts or (prompts is not None and not all(s.processor.reply.at_limit for s in sequences)):
                ahead = self._ahead = AheadPass(self._runner.run_ahead, sequences, prompts)
        for sequence, step in zip(sequences, _sample(logits, sequences, ahead), strict=True):
            self._emit(sequence, step)
        if ahead is not None:
            ahead.began = time.perf_counter()
        if self._runner.run_ahead is None:
            self._cache_prompts(computed)

    def _expects_drafts(self, sequences: list[SequenceState]) -> bool:
        """Whether the next pass is better started when its tokens are known, with drafts behind them."""
        most, costs = MAX_ROWS // len(sequences) - 1, self._pass_costs
        if self._runner.verify_drafts is None or most < 1 or not costs.knows_plain(len(sequences)):
            return False
        if any(self._lookup(sequence).is_promising(most, costs, len(self._running)) for sequence in sequences):
            return True
        return self._runner.draft_model is not None and any(self._model_lengths(sequences, most))

    def _model_lengths(self, sequences: Sequence[SequenceState], most: int) -> list[int]:
        """How many tokens the draft model should draft for each of the sequences, which share a pass."""
        costs, count = self._pass_costs, len(sequences)
        return [one.model_drafts.length(_within_limit(one, most), costs, count) for one in sequences]

    def _decode_cached(self) -> None:
        """Samples the first tokens of cached prompts from their cached logits, without a pass."""
        found = [(s, s.cached_logits) for s in self._running.values() if s.cached_logits is not None]
        if not found:
            return
        for sequence, _ in found:
            sequence.cached_logits, sequence.prompt_cached = None, True
        sequences, cached = [sequence for sequence, _ in found], [logits for _, logits in found]
        if self._ahead is None:  # to look for drafts takes time, in which the first pass can run
            self._emit_all(sequences, self._join_cached(sequences, cached), may_draft=False)
            return
        for sequence, step in zip(sequences, _sample(_join(cached), sequences), strict=True):
            self._emit(sequence, step)

    def _join_cached(self, sequences: list[SequenceState], cached: list[Logits]) -> Logits:
        """As one batch, from which passes run ahead. No pass does so yet."""
        try:
            if self._runner.resume_cached is not None:
                return self._runner.resume_cached(sequences, cached)
        except Exception as error:
            as_engine_error(error)  # raises where the device is lost; else they are sampled as they are
        return _join(cached)

    def _cache_prompts(self, computed: Sequence[tuple[SequenceState, int, Logits]]) -> None:
        """Caches prompts, after all of each is computed. What was sampled reaches its readers first. `computed`:
        sequences that aren't cached yet, each with the number of its tokens and the logits after them."""
        for sequence, tokens, logits in computed:
            if self._running.get(sequence.generation) is sequence or sequence in self._ended:  # it has its slot
                self._outbox.flush()
                sequence.prompt_cached = True
                _try_to_cache(partial(self._runner.cache_prefix, sequence, tokens, logits))

    def _emit(self, sequence: SequenceState, step: SampledStep) -> None:
        if isinstance(step, PalaverError):
            self._finish(sequence, step)
            return
        sequence.append_token(step.token_id)
        self._outbox.put(sequence.generation, step)
        ended = sequence.processor.reply.ended
        if ended is not None:
            self._finish(sequence, ended)
        elif self._runner.needs_recompute(sequence):
            self._preempt(sequence)

    def _forward(
        self, sequences: list[SequenceState], counts: list[int], need_logits: bool = True
    ) -> list[tuple[list[SequenceState], Logits]]:
        """Runs the model. If a batch fails, each sequence is tried alone, so that only the faulty ones fail."""
        if not sequences:
            return []
        if self._runner.supports_batching or len(sequences) == 1:
            try:
                return [(sequences, self._runner.run(sequences, counts, need_logits))]
            except CacheFull as error:
                return self._forward_after_preemption(sequences, counts, need_logits, error)
            except PassInterrupted:  # the command that cancels its request is next
                return []
            except Exception as error:
                if len(sequences) == 1:
                    self._finish(sequences[0], as_engine_error(error))
                    return []
        pairs = zip(sequences, counts, strict=True)
        return [part for sequence, count in pairs for part in self._forward([sequence], [count], need_logits)]

    def _forward_after_preemption(
        self, sequences: list[SequenceState], counts: list[int], need_logits: bool, error: CacheFull
    ) -> list[tuple[list[SequenceState], Logits]]:
        """The cache is full: frees what has ended, else preempts the youngest running sequence, and runs the others."""
        if self._ended:
            self._release_ended()
            return self._forward(sequences, counts, need_logits)
        youngest = list(self._running.values())[-1]
        if len(self._running) == 1:
            self._finish(youngest, error)
        else:
            self._preempt(youngest)
        rest = [(s, n) for s, n in zip(sequences, counts, strict=True) if s.generation in self._running]
        return self._forward([s for s, _ in rest], [n for _, n in rest], need_logits)

    def _preempt(self, sequence: SequenceState) -> None:
        """Moves a running sequence to the head of the queue. Its computed tokens are cached."""
        del self._running[sequence.generation]
        self._release(sequence)
        sequence.computed_tokens = 0
        self._waiting.requeue(sequence)

    def _finish(self, sequence: SequenceState, output: Ended | PalaverError) -> None:
        del self._running[sequence.generation]
        self._waiting.record_finish()
        self._record_opening(sequence)
        self._ended.append(sequence)
        self._outbox.put(sequence.generation, output)

    def _record_opening(self, sequence: SequenceState) -> None:
        prompt = sequence.generation.prompt
        start = len(prompt.context_ids)
        opening = tuple(sequence.token_ids[start : start + OPENING_TOKENS])
        if opening and not prompt.reply_ids and self._runner.verify_drafts is not None:
            self._openings.record(sequence.space, prompt.context_ids, opening)

    def _release_ended(self) -> None:
        """Caches what ended sequences computed, and frees their slots."""
        ended, self._ended = self._ended, []
        for sequence in ended:
            self._release(sequence)

    def _release(self, sequence: SequenceState) -> None:
        _try_to_cache(partial(self._runner.release, sequence))
        if self._runner.draft_model is not None:
            _try_to_cache(partial(self._runner.draft_model.release, sequence))


def _try_to_cache(cache: Callable[[], None]) -> None:
    """Caching is best effort: if a copy can't be allocated, a later request misses the cache, and nothing else."""
    try:
        cache()
    except Exception as error:
        _log.warning("Could not keep what was computed: %s", as_engine_error(error))


@dataclass(frozen=True, slots=True)
class _Verified:
    """A sequence whose draft was computed: its rows of the logits begin at `first_row`."""

    sequence: SequenceState
    draft: Sequence[int]
    first_row: int
    steps: Sequence[SampledStep | None]
    """As of `Logits.sample_ahead`."""

    @classmethod
    def of(cls, sequence: SequenceState, draft: Sequence[int], first_row: int, logits: Logits) -> _Verified:
        steps: Sequence[SampledStep | None] = ()
        try:
            if draft:
                steps = logits.sample_ahead(first_row, 1 + len(draft), sequence.processor)
        except Exception as error:
            as_engine_error(error)  # raises where the device is lost; else each row is tried alone
        return cls(sequence, draft, first_row, steps)

    def step(self, accepted: int) -> SampledStep | None:
        """The token after so many accepted ones, if it is sampled already."""
        known = accepted < len(self.steps) and self.sequence.processor.draws_freely
        return self.steps[accepted] if known else None


class _VerifiedPass(NamedTuple):
    ended: Sequence[tuple[_Verified, int]]
    """Each sequence with the number of its accepted tokens."""
    first_sampled: float
    """When the first token of each was known."""


def _within_limit(sequence: SequenceState, most: int) -> int:
    """At most so many tokens of a draft: the token after it belongs to the reply, too."""
    left = sequence.processor.reply.tokens_left
    return most if left is None else max(0, min(most, left - 1))


def _join(logits: Sequence[Logits]) -> Logits:
    return logits[0].joined(logits[1:]) if len(logits) > 1 else logits[0]


def _sample_verified(logits: Logits, verified: Sequence[_Verified], accepted: int) -> list[SampledStep]:
    """The next token of each sequence, after so many accepted ones."""
    steps = [one.step(accepted) for one in verified]
    missing = [one for one, step in zip(verified, steps, strict=True) if step is None]
    if missing:
        rows = [one.first_row + accepted for one in missing]
        sampled = iter(_sample(logits.select(rows), [one.sequence for one in missing]))
        return [next(sampled) if step is None else step for step in steps]
    return [step for step in steps if step is not None]


def _sample(logits: Logits, sequences: list[SequenceState], ahead: AheadPass | None = None) -> Sequence[SampledStep]:
    """The next token of each sequence. If sampling fails for the batch, each row is tried alone."""
    try:
        processors = [sequence.processor for sequence in sequences]
        return logits.sample(processors) if ahead is None else logits.sample(processors, ahead)
    except Exception as error:
        if ahead is not None:
            ahead.drop_all()
        if len(sequences) == 1:
            return [as_engine_error(error)]
        return [step for row, sequence in enumerate(sequences) for step in _sample(logits.row(row), [sequence])]
