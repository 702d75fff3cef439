"""The engine over a runner: everything between a request and the model's passes that needs no framework.

The worker is the engine's thread, the only one that uses the device: it handles commands between steps, and runs steps
on demand."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

from palaver.constraints import Constraint
from palaver.engines.base import Capability, EngineInfo, EngineState, EngineStatus, check_capabilities, check_prompt
from palaver.engines.core.generation import (
    AnswerNowCommand,
    CancelCommand,
    CloseCommand,
    Command,
    ForgetCommand,
    LocalGeneration,
    Outbox,
    ReplyState,
    SubmitCommand,
)
from palaver.engines.core.grammar import AnswerGrammar, ReplyGrammar, control_ids, reply_constraints
from palaver.engines.core.logits_processors import (
    BannedStrings,
    SpokenText,
    TokenHealing,
    UnspeakableTokens,
    VocabularyIndex,
)
from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.processor import LogitsProcessor, RepetitionPenalty
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import Runner
from palaver.engines.core.scheduler import Scheduler, SchedulerLimits
from palaver.engines.grammars import CompiledGrammar, GrammarCache, missing_package
from palaver.errors import EngineClosed, EngineError, PalaverError
from palaver.generation import Prompt
from palaver.phases import Vocabulary
from palaver.sampling import Sampling, check_sampling


class Worker:
    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        thread_context: Callable[[], AbstractContextManager[object]],
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Both callbacks run in the worker's thread: all of its work happens inside of `thread_context`; `on_failure`
        is called when an error ends it, before its requests fail."""
        self._scheduler = scheduler
        self._outbox = outbox
        self._thread_context = thread_context
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._exit_reason: PalaverError | None = None
        """Why the thread has ended; None while it runs."""
        self._lock = threading.Lock()
        self.seconds = 0.0
        """CPU time of the thread so far."""
        self._thread = threading.Thread(target=self._run, name="palaver-engine", daemon=True)
        self._thread.start()

    def post(self, command: Command) -> None:
        """Sends a command to the thread. After the thread's end a submitted request fails at once."""
        with self._lock:
            if self._exit_reason is None:
                self._inbox.put(command)
            elif type(command) is SubmitCommand:
                command.generation.push(self._exit_reason)  # called by the reader itself, which does not wait yet
            elif isinstance(command, ForgetCommand):
                command.done()

    @property
    def exit_reason(self) -> PalaverError | None:
        return self._exit_reason

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        reason: PalaverError = EngineClosed()
        try:
            with self._thread_context():
                self._loop()
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)
            reason = EngineError(f"The engine's thread failed ({type(error).__name__}: {error}). Restart the engine.")
        self._shut_down(reason)

    def _loop(self) -> None:
        while self._handle_commands():
            self._scheduler.step()
            self._outbox.flush_if_due()
            self.seconds = time.thread_time()

    def _handle_commands(self) -> bool:
        """Waits for work if there is none. Returns False when the engine is closed."""
        while True:
            try:
                command = self._inbox.get(block=not self._scheduler.busy)
            except queue.Empty:
                return True
            if isinstance(command, CloseCommand):
                return False
            self._handle(command)
            self._outbox.flush()

    def _handle(self, command: SubmitCommand | ForgetCommand) -> None:
        match command:
            case ForgetCommand():
                try:
                    self._scheduler.forget(command.conversation)
                finally:
                    command.done()
            case CancelCommand():
                self._scheduler.cancel(command.generation)
            case AnswerNowCommand():
                self._scheduler.answer_now(command.generation)
            case _:
                self._scheduler.submit(command.generation)

    def _shut_down(self, reason: PalaverError) -> None:
        with self._lock:
            self._exit_reason = reason
        waiting: list[LocalGeneration] = self._scheduler.drain()
        while not self._inbox.empty():
            command = self._inbox.get()
            if type(command) is SubmitCommand:
                waiting.append(command.generation)
            elif isinstance(command, ForgetCommand):
                command.done()
        for generation in waiting:
            self._outbox.put(generation, reason)
        self._outbox.flush()


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    running: int
    waiting: int
    cache: CacheStatistics
    thread_seconds: float
    """CPU time of the engine's thread since the start."""
    forward_seconds: float
    """The part of it in the model's forward passes."""


class LocalEngine:
    """Generates token ids with one model, in a thread of its own."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        runner: Runner,
        limits: SchedulerLimits | None = None,
        thread_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`vocabulary` holds the bytes of each token id. `thread_context` is entered in the engine's thread before any
        of its work; `on_failure` is called there when an error ends it."""
        no_grammars = missing_package()
        self._info = replace(info, lacks={**info.lacks, Capability.CONSTRAINTS: no_grammars}) if no_grammars else info
        self._vocabulary = vocabulary
        self._vocabulary_index = VocabularyIndex(vocabulary)
        self._unspeakable: UnspeakableTokens | None = None
        self._grammars = GrammarCache(vocabulary)
        self._runner = runner
        outbox = Outbox()
        self._scheduler = Scheduler(runner, outbox, self._sequence, limits)
        self._worker = Worker(self._scheduler, outbox, thread_context, on_failure)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        reason = self._worker.exit_reason
        return EngineStatus(EngineState.READY) if reason is None else EngineStatus(EngineState.FAILED, str(reason))

    @property
    def statistics(self) -> EngineStatistics:
        running, waiting = self._scheduler.counts
        return EngineStatistics(
            running, waiting, self._runner.statistics, self._worker.seconds, self._runner.forward_seconds
        )

    async def metrics(self) -> dict[str, float]:
        now = self.statistics
        return {"running": now.running, "waiting": now.waiting, **asdict(now.cache)}

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> LocalGeneration:
        check_capabilities(self._info, prompt, sampling, choice)
        constrained = reply_constraints(prompt.phases, sampling)
        grammars: dict[Constraint, CompiledGrammar] = {}

        async def prepare() -> None:
            for constraint in constrained:
                grammars[constraint] = await self._grammars.compile(constraint)
            if sampling.spoken and self._unspeakable is None:
                await asyncio.to_thread(self._unspeakable_tokens)
            if strings:
                await asyncio.to_thread(self._index_strings, strings)

        strings = (*sampling.banned_strings, *(sampling.dry_sequence_breakers if sampling.dry_multiplier else ()))
        needed = constrained or strings or (sampling.spoken and self._unspeakable is None)
        ready = prepare if needed else None
        return LocalGeneration(prompt, check_sampling(sampling), choice, self._post, ready, grammars)

    def _post(self, command: Command) -> None:
        """Sends a generation's command to the worker. From any thread."""
        self._worker.post(command)

    async def forget(self, conversation: str) -> None:
        forgotten = threading.Event()
        self._worker.post(ForgetCommand(conversation, forgotten.set))
        await asyncio.to_thread(forgotten.wait)

    async def close(self) -> None:
        self._worker.post(CloseCommand())
        await asyncio.to_thread(self._worker.join)
        await asyncio.to_thread(self._grammars.close)

    def warm_grammars(self) -> None:
        """Prepares the grammar compiler. Takes up to a second: don't call it in the event loop."""
        if Capability.CONSTRAINTS not in self._info.lacks:
            self._grammars.warm()

    def _sequence(self, generation: LocalGeneration) -> SequenceState:
        """The state of a generation, before its partial reply is replayed."""
        prompt, sampling = generation.prompt, generation.sampling
        check_prompt(self._info, prompt)
        reply = ReplyState(
            replace(prompt, reply_ids=()), sampling, self._vocabulary, self._info.end_ids, self._info.context_length
        )
        banned, grammar = self._banned(prompt, sampling), self._grammar(generation)
        size = self._info.vocabulary_size
        spoken_text = self._spoken_text(prompt, sampling)
        dry = RepetitionPenalty(sampling, self._vocabulary_index, size) if sampling.dry_multiplier else None
        processor = LogitsProcessor(prompt, sampling, generation.choice, reply, size, banned, grammar, spoken_text, dry)
        return SequenceState(generation, processor, self._token_healing(prompt))

    def _index_strings(self, strings: Iterable[str]) -> None:
        """Computes the tokens that complete banned strings, off the engine's thread; the index caches them."""
        for string in strings:
            self._vocabulary_index.completions(string.encode())

    def _banned(self, prompt: Prompt, sampling: Sampling) -> BannedStrings | None:
        if not sampling.banned_strings:
            return None
        control = control_ids(prompt.phases) | self._info.end_ids
        return BannedStrings(sampling.banned_strings, self._vocabulary_index, control)

    def _token_healing(self, prompt: Prompt) -> TokenHealing | None:
        if not prompt.healing:
            return None
        return TokenHealing(prompt.healing, self._vocabulary_index, control_ids(prompt.phases) | self._info.end_ids)

    def _grammar(self, generation: LocalGeneration) -> AnswerGrammar | ReplyGrammar | None:
        phases, constraint = generation.prompt.phases, generation.sampling.constraint
        if phases.held is not None:
            return ReplyGrammar(phases, generation.grammars, self._vocabulary_index)
        if constraint is None:
            return None
        return AnswerGrammar(phases, generation.grammars[constraint], self._vocabulary_index)

    def _spoken_text(self, prompt: Prompt, sampling: Sampling) -> SpokenText | None:
        if not sampling.spoken:
            return None
        return SpokenText(prompt.phases, control_ids(prompt.phases) | self._info.end_ids, self._unspeakable_tokens())

    def _unspeakable_tokens(self) -> UnspeakableTokens:
        if self._unspeakable is None:
            self._unspeakable = UnspeakableTokens(self._vocabulary_index)
        return self._unspeakable
