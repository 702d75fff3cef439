"""The one thread that owns the device: takes commands between steps, and runs steps while there is work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from palaver.engines.core.generation import (
    AnswerNowCommand,
    CancelCommand,
    CloseCommand,
    Command,
    ForgetCommand,
    Outbox,
    SubmitCommand,
    TorchGeneration,
)
from palaver.engines.core.scheduler import Scheduler
from palaver.engines.torch.memory import ThreadCounts
from palaver.errors import EngineClosed, EngineError, PalaverError


class Worker:
    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        threads: ThreadCounts,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`on_failure` is called in the worker's thread when an error ends it, before requests are failed."""
        self._scheduler = scheduler
        self._outbox = outbox
        self._threads = threads
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._over: PalaverError | None = None
        """Why the thread has ended."""
        self._lock = threading.Lock()
        self.seconds = 0.0
        """The CPU time the thread has taken so far."""
        self._thread = threading.Thread(target=self._run, name="palaver-engine", daemon=True)
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hands a command over. What is submitted after the end is told so at once."""
        with self._lock:
            if self._over is None:
                self._inbox.put(command)
            elif type(command) is SubmitCommand:
                command.generation.arrive(self._over)  # its owner, who calls this, doesn't wait yet
            elif isinstance(command, ForgetCommand):
                command.done()

    @property
    def over(self) -> PalaverError | None:
        return self._over

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        reason: PalaverError = EngineClosed()
        try:
            self._threads.settle()
            with torch.inference_mode():
                self._work()
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)
            reason = EngineError(f"The engine's thread died ({type(error).__name__}: {error}): start the engine again.")
        self._end(reason)

    def _work(self) -> None:
        while self._take_commands():
            self._scheduler.step()
            self._outbox.send_in_time()
            self.seconds = time.thread_time()

    def _take_commands(self) -> bool:
        """Waits for work if there is none. False when it is time to close."""
        while True:
            try:
                command = self._inbox.get(block=not self._scheduler.busy)
            except queue.Empty:
                return True
            if isinstance(command, CloseCommand):
                return False
            self._obey(command)
            self._outbox.send()

    def _obey(self, command: SubmitCommand | ForgetCommand) -> None:
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

    def _end(self, reason: PalaverError) -> None:
        with self._lock:
            self._over = reason
        waiting: list[TorchGeneration] = self._scheduler.abandon()
        while not self._inbox.empty():
            command = self._inbox.get()
            if type(command) is SubmitCommand:
                waiting.append(command.generation)
            elif isinstance(command, ForgetCommand):
                command.done()
        for generation in waiting:
            self._outbox.put(generation, reason)
        self._outbox.send()
