"""The engine's thread, the only one that uses the device: handles commands between steps, runs steps on demand."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

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
from palaver.engines.core.scheduler import Scheduler
from palaver.errors import EngineClosed, EngineError, PalaverError


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
