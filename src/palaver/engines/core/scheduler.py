"""Which sequences run in a step. Requests join and leave between steps; each fails or ends on its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from palaver.engines.core.generation import Outbox, TorchGeneration
from palaver.engines.core.queue import RequestQueue, prefill_shares
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import Runner
from palaver.engines.core.sampler import sample
from palaver.errors import CacheFull, EngineError, PalaverError
from palaver.generation import AnswerAsked, Ended, Finish, Prefilled, Step

_log = logging.getLogger(__name__)

FATAL = ("AcceleratorError",)
"""Errors after which the device can't be used any more, by name: not every version of torch has them."""

UNDISTURBED = 4
"""So many chunks are computed at once where nobody waits for a token meanwhile."""

RESTORED = 256
"""So many tokens of replies that go on are taken again in a step: a millisecond or two."""
LOOKAHEAD = 64
"""How many of those that wait are looked at in a step."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much is done at once."""

    running: int = 32
    waiting: int = 1024
    """Places in the queue; an owner may take as many as are left free."""
    chunk: int = 128
    """Prompt tokens computed in a step: what a long prompt delays the others by."""


class Scheduler:
    def __init__(
        self,
        runner: Runner,
        outbox: Outbox,
        prepare: Callable[[TorchGeneration], SequenceState],
        limits: SchedulerLimits | None = None,
    ) -> None:
        self._runner = runner
        self._outbox = outbox
        self._prepare = prepare
        self._limits = limits or SchedulerLimits()
        self._running: dict[TorchGeneration, SequenceState] = {}
        self._waiting = RequestQueue(self._limits.waiting)
        self._restoring: list[SequenceState] = []
        """Those of the queue whose replies are not in the state yet in which they go on."""
        self._full_at = -1
        """The version of the queue for which the cache had no room: it is not asked again before something changes."""

    @property
    def busy(self) -> bool:
        return bool(self._running) or bool(self._waiting)

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return len(self._running), len(self._waiting)

    def submit(self, generation: TorchGeneration) -> None:
        try:
            sequence = self._prepare(generation)
            sequence.restore(RESTORED)
            ended = sequence.chooser.reply.ended
            if ended is not None:
                self._outbox.put(generation, ended)
                return
            self._runner.check(sequence)
            self._waiting.add(sequence)
        except Exception as error:
            self._outbox.put(generation, _as_engine_error(error))
            return
        if not sequence.restored:
            self._restoring.append(sequence)

    def cancel(self, generation: TorchGeneration) -> None:
        if generation in self._running:
            self._finish(self._running[generation], Ended(Finish.STOPPED))
        elif self._waiting.remove(generation):
            self._outbox.put(generation, Ended(Finish.STOPPED))

    def answer_now(self, generation: TorchGeneration) -> None:
        sequence = self._running.get(generation) or self._waiting.find(generation)
        if sequence is not None:
            said = len(sequence.tokens) - len(generation.prompt.context_ids)
            self._outbox.put(generation, AnswerAsked(sequence.chooser.reply.answer_now(said)))

    def forget(self, conversation: str) -> None:
        self._runner.forget(conversation)

    def abandon(self) -> list[TorchGeneration]:
        """Forgets everything; returns who still waits for an answer."""
        left = [*self._running, *self._waiting.generations]
        self._running.clear()
        self._waiting.clear()
        self._restoring.clear()
        return left

    def step(self) -> None:
        """Lets in who fits, computes one chunk of prompts, and the next token of every reply."""
        if self._waiting:
            if self._restoring:
                self._restore()
            self._admit()
        for sequence in list(self._running.values()):
            if sequence.logits is not None:
                self._say_known(sequence, sequence.logits)
        filling = [sequence for sequence in self._running.values() if sequence.pending > 1]
        if filling and self._prefill(filling):
            return
        ready = [sequence for sequence in self._running.values() if sequence.pending == 1]
        self._decode(ready, [1] * len(ready))

    def _restore(self) -> None:
        """Brings long replies that go on to where they were, a bounded number of tokens in a step."""
        self._restoring = [s for s in self._restoring if self._waiting.find(s.generation) is not None]
        for sequence in self._restoring:
            try:
                sequence.restore(max(1, RESTORED // len(self._restoring)))
            except Exception as error:
                self._refuse(sequence, _as_engine_error(error))
                continue
            ended = sequence.chooser.reply.ended
            if ended is not None:
                self._refuse(sequence, ended)
        self._restoring = [sequence for sequence in self._restoring if not sequence.restored]

    def _refuse(self, sequence: SequenceState, arrival: Ended | PalaverError) -> None:
        """It leaves the queue without being let in."""
        self._waiting.remove(sequence.generation)
        self._outbox.put(sequence.generation, arrival)

    def _admit(self) -> None:
        if len(self._running) < self._limits.running and self._waiting.version != self._full_at:
            filling = [sequence for sequence in self._running.values() if sequence.pending > 1]
            for sequence in self._waiting.sequences[:LOOKAHEAD]:
                if len(self._running) >= self._limits.running:
                    break
                if not sequence.restored or self._waits_for_a_prefill(sequence, filling):
                    continue
                if not self._begin(sequence):
                    self._full_at = self._waiting.version
                    break
                if sequence.pending > 1 and sequence.generation in self._running:
                    filling.append(sequence)
        for generation, queued in self._waiting.news():
            self._outbox.put(generation, queued)

    def _begin(self, sequence: SequenceState) -> bool:
        """False where it must wait for others to leave."""
        try:
            self._runner.begin(sequence)
        except Exception as error:
            failure = _as_engine_error(error)
            if isinstance(failure, CacheFull) and self._running:
                return False
            self._refuse(sequence, failure)
            return True
        self._waiting.admit(sequence.generation)
        self._running[sequence.generation] = sequence
        self._note_filled(sequence)
        return True

    def _waits_for_a_prefill(self, sequence: SequenceState, filling: list[SequenceState]) -> bool:
        """Whether most of what it lacks is being computed for another: what two need is computed once."""
        awaited = sequence.awaited
        if awaited is not None and awaited.generation in self._running and awaited.pending > 1:
            return True
        sequence.awaited = None
        shared = [(sequence.common(other), other) for other in filling if other.space == sequence.space]
        common, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        if best is None or 2 * common < len(sequence.tokens):
            return False
        common = min(common, best.prompt_tokens - 1)
        known = self._runner.known(sequence)
        if common > known and 2 * (common - known) >= len(sequence.tokens) - known:
            sequence.awaited = best
        return sequence.awaited is not None

    def _prefill(self, filling: list[SequenceState]) -> bool:
        """Whether those were all, and each has got its first token in the same pass."""
        delays_others = len(filling) < len(self._running)
        chunk = self._limits.chunk if delays_others else self._limits.chunk * UNDISTURBED
        chosen = prefill_shares(filling, chunk, self._runner.most)
        sequences, counts = [sequence for sequence, _ in chosen], [count for _, count in chosen]
        whole = sum(counts) == sum(sequence.pending - 1 for sequence in filling)
        if whole and not delays_others and self._runner.closes:
            self._decode(sequences, [count + 1 for count in counts])
            return True
        self._compute(sequences, counts, asked=False)
        for sequence in sequences:
            if sequence.generation in self._running:
                self._note_filled(sequence)
        return False

    def _note_filled(self, sequence: SequenceState) -> None:
        if not sequence.filled and sequence.pending <= 1:
            sequence.filled = True
            self._outbox.put(sequence.generation, Prefilled(sequence.prompt_tokens, sequence.cached))

    def _decode(self, ready: list[SequenceState], counts: list[int]) -> None:
        """What comes after the next so many tokens of each, which are all there are."""
        for sequences, logits in self._compute(ready, counts):
            for row, step in enumerate(_choose(logits, sequences)):
                self._note_filled(sequences[row])
                self._keep_prompt(sequences[row], logits[row])
                self._say(sequences[row], step)

    def _say_known(self, sequence: SequenceState, logits: Tensor) -> None:
        """The first token of a prompt that ended here before: from the very same logits, without a pass."""
        sequence.logits, sequence.kept = None, True
        (step,) = _choose(logits[None], [sequence])
        self._say(sequence, step)

    def _keep_prompt(self, sequence: SequenceState, logits: Tensor) -> None:
        """Once all of the prompt is computed."""
        if not sequence.kept:
            sequence.kept = True
            _try_to_keep(lambda: self._runner.keep(sequence, logits))

    def _say(self, sequence: SequenceState, step: Step | PalaverError) -> None:
        if not isinstance(step, Step):
            self._finish(sequence, step)
            return
        sequence.take(step.token_id)
        self._outbox.put(sequence.generation, step)
        ended = sequence.chooser.reply.ended
        if ended is not None:
            self._finish(sequence, ended)
        elif self._runner.outgrown(sequence):
            self._begin_again(sequence)

    def _compute(
        self, sequences: list[SequenceState], counts: list[int], asked: bool = True
    ) -> list[tuple[list[SequenceState], Tensor]]:
        """Runs the model. What can't be computed together is tried alone, and who fails then, fails alone."""
        if not sequences:
            return []
        together = self._runner.batches or len(sequences) == 1
        if together:
            try:
                return [(sequences, self._runner.run(sequences, counts, asked))]
            except CacheFull as error:
                return self._compute_with_fewer(sequences, counts, asked, error)
            except Exception as error:
                if len(sequences) == 1:
                    self._finish(sequences[0], _as_engine_error(error))
                    return []
        pairs = zip(sequences, counts, strict=True)
        return [part for sequence, count in pairs for part in self._compute([sequence], [count], asked)]

    def _compute_with_fewer(
        self, sequences: list[SequenceState], counts: list[int], asked: bool, error: CacheFull
    ) -> list[tuple[list[SequenceState], Tensor]]:
        """There is no room for all: the youngest goes back to wait, and is computed anew later."""
        youngest = list(self._running.values())[-1]
        if len(self._running) == 1:
            self._finish(youngest, error)
        else:
            self._begin_again(youngest)
        kept = [(s, n) for s, n in zip(sequences, counts, strict=True) if s.generation in self._running]
        return self._compute([s for s, _ in kept], [n for _, n in kept], asked)

    def _begin_again(self, sequence: SequenceState) -> None:
        """Puts the sequence at the head of the queue; what it computed is kept."""
        del self._running[sequence.generation]
        _try_to_keep(lambda: self._runner.end(sequence))
        sequence.computed = 0
        self._waiting.put_back(sequence)

    def _finish(self, sequence: SequenceState, arrival: Ended | PalaverError) -> None:
        del self._running[sequence.generation]
        self._waiting.note_end()
        try:
            _try_to_keep(lambda: self._runner.end(sequence))
        finally:
            self._outbox.put(sequence.generation, arrival)


def _try_to_keep(keep: Callable[[], None]) -> None:
    """Keeping is best effort: a copy that can't be allocated costs a later request its cache hit, nothing else."""
    try:
        keep()
    except Exception as error:
        _log.warning("Could not keep what was computed: %s", _as_engine_error(error))


def _choose(logits: Tensor, sequences: list[SequenceState]) -> list[Step | PalaverError]:
    """The next token of each. Where choosing fails for all, each is tried alone."""
    try:
        return sample(logits, [sequence.chooser for sequence in sequences])
    except Exception as error:
        if len(sequences) == 1:
            return [_as_engine_error(error)]
        rows = zip(logits, sequences, strict=True)
        return [step for row, sequence in rows for step in _choose(row[None], [sequence])]


def _as_engine_error(error: Exception) -> PalaverError:
    if isinstance(error, PalaverError):
        return error
    if type(error).__name__ in FATAL:
        raise error
    return EngineError(f"The engine failed at this request ({type(error).__name__}: {error}).")
