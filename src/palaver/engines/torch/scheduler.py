"""Which sequences run in a step. Requests join and leave between steps; each fails or ends on its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from palaver.engines.torch.generation import Generation, Outbox
from palaver.engines.torch.runner import Runner
from palaver.engines.torch.sampling import choose
from palaver.engines.torch.sequence import Sequence
from palaver.errors import EngineError, PalaverError
from palaver.generation import Ended, Finish, Prefilled, Step

CHUNK = 256


class Scheduler:
    def __init__(self, runner: Runner, outbox: Outbox, prepare: Callable[[Generation], Sequence]) -> None:
        self._runner = runner
        self._outbox = outbox
        self._prepare = prepare
        self._running: dict[Generation, Sequence] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, generation: Generation) -> None:
        try:
            sequence = self._prepare(generation)
        except PalaverError as error:
            self._outbox.put(generation, error)
            return
        if sequence.chooser.reply.ended is not None:
            self._outbox.put(generation, sequence.chooser.reply.ended)
            return
        self._runner.begin(sequence)
        self._running[generation] = sequence

    def cancel(self, generation: Generation) -> None:
        if generation in self._running:
            self._finish(generation, Ended(Finish.STOPPED))

    def answer_now(self, generation: Generation) -> None:
        if generation in self._running:
            self._running[generation].chooser.reply.answer_now()

    def abandon(self) -> list[Generation]:
        """Forgets everything; returns who still waits for an answer."""
        waiting = list(self._running)
        self._running.clear()
        return waiting

    def step(self) -> None:
        for sequence in list(self._running.values()):
            try:
                self._advance(sequence)
            except Exception as error:
                self._finish(sequence.generation, _as_engine_error(error))

    def _advance(self, sequence: Sequence) -> None:
        first = sequence.computed < sequence.prompt_tokens
        logits = self._runner.run([sequence], [min(CHUNK, sequence.pending)])
        if sequence.pending:
            return
        if first:
            self._outbox.put(sequence.generation, Prefilled(sequence.prompt_tokens, sequence.cached))
        self._say(sequence, logits)

    def _say(self, sequence: Sequence, logits: Tensor) -> None:
        step = choose(logits, [sequence.chooser])[0]
        if not isinstance(step, Step):
            self._finish(sequence.generation, step)
            return
        sequence.take(step.token_id)
        self._outbox.put(sequence.generation, step)
        ended = sequence.chooser.reply.ended
        if ended is not None:
            self._finish(sequence.generation, ended)

    def _finish(self, generation: Generation, arrival: Ended | PalaverError) -> None:
        sequence = self._running.pop(generation)
        self._runner.end(sequence)
        self._outbox.put(generation, arrival)


def _as_engine_error(error: Exception) -> PalaverError:
    if isinstance(error, PalaverError):
        return error
    return EngineError(f"The engine failed at this request ({type(error).__name__}: {error}).")
