"""The engine over a runner: everything between a request and the model's passes that needs no framework.

The worker is the engine's thread, the only one that uses the device: it handles commands between steps, and runs steps
on demand."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from palaver.constraints import Constraint
from palaver.engines.base import BY_TEXT, EngineInfo, EngineState, EngineStatus, check_capabilities
from palaver.engines.core.generation import (
    AnswerNowCommand,
    CancelCommand,
    CloseCommand,
    Command,
    ForgetCommand,
    LocalGeneration,
    Outbox,
    SubmitCommand,
)
from palaver.engines.core.logits_processor import ProcessorFactory, with_grammars
from palaver.engines.core.media import MediaCache, ProcessedMedia, with_media
from palaver.engines.core.prefix_cache import CacheStatistics
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import Runner
from palaver.engines.core.scheduler import Scheduler, SchedulerLimits
from palaver.engines.grammars import CompiledGrammar
from palaver.errors import EngineClosed, EngineError, PalaverError, UnsupportedContent
from palaver.generation import MediaExpansion, MediaItem, Prompt
from palaver.phases import Vocabulary
from palaver.sampling import Sampling, check_sampling

IDLE_S = 0.2
"""How long a worker waits for requests before it does what can wait."""


class StepScheduler(Protocol):
    """What a worker runs. It is used in the worker's thread alone."""

    @property
    def busy(self) -> bool: ...

    def submit(self, generation: LocalGeneration) -> None: ...

    def cancel(self, generation: LocalGeneration) -> None: ...

    def answer_now(self, generation: LocalGeneration) -> None: ...

    def forget(self, conversation: str) -> None: ...

    def drain(self) -> list[LocalGeneration]: ...

    def step(self) -> None: ...


class Worker:
    def __init__(
        self,
        scheduler: StepScheduler,
        outbox: Outbox,
        thread_context: Callable[[], AbstractContextManager[object]],
        on_failure: Callable[[BaseException], None] | None = None,
        on_idle: Callable[[], bool] | None = None,
    ) -> None:
        """All callbacks run in the worker's thread: all of its work happens inside of `thread_context`; `on_failure`
        is called when an error ends it, before its requests fail; `on_idle` after IDLE_S without requests, until it
        returns False."""
        self._scheduler = scheduler
        self._outbox = outbox
        self._thread_context = thread_context
        self._on_failure = on_failure
        self._on_idle = on_idle
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
                command = self._inbox.get_nowait() if self._scheduler.busy else self._wait()
            except queue.Empty:
                return True
            if isinstance(command, CloseCommand):
                return False
            self._handle(command)
            self._outbox.flush()

    def _wait(self) -> Command:
        """The next command."""
        while self._on_idle is not None:
            try:
                return self._inbox.get(timeout=IDLE_S)
            except queue.Empty:
                if not self._on_idle():
                    break
        return self._inbox.get()

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
    draft_tokens: int
    accepted_tokens: int
    """Tokens that were drafted since the start, and those that were accepted."""


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
        media: MediaCache | None = None,
        on_idle: Callable[[], bool] | None = None,
    ) -> None:
        """`vocabulary` holds the bytes of each token id. `media`: None if the model takes text only.
        `thread_context` is entered in the engine's thread before any of its work; `on_failure` and `on_idle`: as in
        `Worker`."""
        self._media = media
        if runner.verify_drafts is not None and info.exactness != BY_TEXT:
            info = replace(info, steps=f"{info.steps}, drafts up to rounding")
        self._info = with_grammars(info if media is None else with_media(info, media))
        self._processors = ProcessorFactory(self._info, vocabulary)
        self._runner = runner
        outbox = Outbox()
        self._scheduler = Scheduler(runner, outbox, self._sequence, limits)
        self._worker = Worker(self._scheduler, outbox, thread_context, on_failure, on_idle)

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
            running,
            waiting,
            self._cache_statistics,
            self._worker.seconds,
            self._runner.forward_seconds,
            self._scheduler.draft_tokens,
            self._scheduler.accepted_tokens,
        )

    @property
    def _cache_statistics(self) -> CacheStatistics:
        """The memory is that of the model's cache and its draft model's; the tokens are the model's."""
        own, draft_model = self._runner.statistics, self._runner.draft_model
        if draft_model is None:
            return own
        draft = draft_model.statistics
        return replace(
            own,
            limit_bytes=own.limit_bytes + draft.limit_bytes,
            used_bytes=own.used_bytes + draft.used_bytes,
            kept_bytes=own.kept_bytes + draft.kept_bytes,
        )

    async def metrics(self) -> dict[str, float]:
        now = self.statistics
        drafts = {"draft_tokens": now.draft_tokens, "accepted_tokens": now.accepted_tokens}
        return {"running": now.running, "waiting": now.waiting, **asdict(now.cache), **drafts}

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> LocalGeneration:
        check_capabilities(self._info, prompt, sampling, choice)
        grammars: dict[Constraint, CompiledGrammar] = {}

        async def prepare() -> None:
            grammars.update(await self._processors.prepare(prompt, sampling))

        ready = prepare if self._processors.needs_preparation(prompt, sampling) else None
        load = self._load_media if prompt.media else None
        return LocalGeneration(prompt, check_sampling(sampling), choice, self._post, ready, grammars, load)

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        if self._media is None:
            raise UnsupportedContent(f"The model {self._info.model!r} takes text only.")
        return self._media.expand(item)

    def _load_media(self, item: MediaItem) -> ProcessedMedia:
        assert self._media is not None, "media are refused by models that don't take them"
        return self._media.load(item)

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
        await asyncio.to_thread(self._processors.close)

    def warm_grammars(self) -> None:
        """Prepares the grammar compiler. Takes up to a second: don't call it in the event loop."""
        self._processors.warm()

    def _sequence(self, generation: LocalGeneration) -> SequenceState:
        """The state of a generation, before its partial reply is replayed."""
        prompt, sampling = generation.prompt, generation.sampling
        processor = self._processors.build(prompt, sampling, generation.choice, generation.grammars)
        return SequenceState(generation, processor, self._processors.token_healing(prompt))
