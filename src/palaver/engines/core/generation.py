"""One generation: the worker's thread produces its outputs, the caller's event loop reads them.

The caller sends commands (submit, cancel, answer now) to the worker; the outbox wakes the callers that wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType

from palaver.constraints import Constraint
from palaver.engines.grammars import CompiledGrammar
from palaver.errors import PalaverError
from palaver.generation import Ended, Output, Prompt, Step
from palaver.sampling import Sampling

WAKE_INTERVAL_S = 0.008
"""Readers are woken at most this often while only tokens arrive: waking a reader costs as much as sampling."""
EAGER_TOKENS = 4
"""The first tokens of a reply wake their reader at once: they are seldom visible text."""


class PendingStep:
    """A step whose alternatives are not read yet. The reader of the reply reads them, so that the worker's thread can
    start the next pass."""

    __slots__ = ("_build", "token_id")

    def __init__(self, token_id: int, build: Callable[[], Step]) -> None:
        self.token_id = token_id
        self._build = build

    def build(self) -> Step:
        return self._build()


OutputOrError = Output | PendingStep | PalaverError


class LocalGeneration:
    """An async context manager over the outputs. Leaving it cancels the generation within one step."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        post: Callable[[Command], None],
        prepare: Callable[[], Awaitable[None]] | None = None,
        grammars: Mapping[Constraint, CompiledGrammar] | None = None,
    ) -> None:
        """`prepare` is awaited before the request is submitted; it fills `grammars`."""
        self.prompt = prompt
        self.sampling = sampling
        self.choice = choice
        self.grammars = {} if grammars is None else grammars
        self.loop: asyncio.AbstractEventLoop
        self._post = post
        self._prepare = prepare
        self._outputs: deque[OutputOrError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        """Set while the reader waits for an output."""
        self._finished = False
        self.token_count = 0
        """Tokens generated so far."""

    async def __aenter__(self) -> LocalGeneration:
        self.loop = asyncio.get_running_loop()
        if self._prepare is not None:
            await self._prepare()
        self._post(SubmitCommand(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._finished = True
            self._post(CancelCommand(self))

    def __aiter__(self) -> LocalGeneration:
        return self

    async def __anext__(self) -> Output:
        if self._finished:
            raise StopAsyncIteration
        while not self._outputs:
            self._waiter = waiter = self.loop.create_future()
            if not self._outputs:  # an output that was pushed before the waiter was set wakes no reader
                await waiter
        output = self._outputs.popleft()
        if isinstance(output, PendingStep):
            return output.build()
        if isinstance(output, PalaverError):
            self._finished = True
            raise output
        self._finished = isinstance(output, Ended)
        return output

    def stop(self) -> None:
        """Ends the generation within one step. Earlier outputs and `Ended` still arrive."""
        self._post(CancelCommand(self))

    def answer_now(self) -> None:
        """Closes an open thought with the next token."""
        self._post(AnswerNowCommand(self))

    def push(self, output: OutputOrError) -> asyncio.Future[None] | None:
        """Called in any thread. Returns the reader's waiter, which must be woken in its own event loop."""
        self._outputs.append(output)
        waiter, self._waiter = self._waiter, None
        return waiter


class SubmitCommand:
    __slots__ = ("generation",)

    def __init__(self, generation: LocalGeneration) -> None:
        self.generation = generation


class CancelCommand(SubmitCommand):
    __slots__ = ()


class AnswerNowCommand(SubmitCommand):
    __slots__ = ()


class ForgetCommand:
    """`done` is called in the worker's thread once the conversation's cache is freed, or if the worker has ended."""

    __slots__ = ("conversation", "done")

    def __init__(self, conversation: str, done: Callable[[], None]) -> None:
        self.conversation = conversation
        self.done = done


class CloseCommand:
    __slots__ = ()


Command = SubmitCommand | CancelCommand | AnswerNowCommand | ForgetCommand | CloseCommand


class Outbox:
    """Delivers outputs to their readers. Wakes each event loop once for all of its waiting readers."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self._urgent = False
        self._last_flush = 0.0

    def put(self, generation: LocalGeneration, output: OutputOrError) -> None:
        waiter = generation.push(output)
        if waiter is not None:
            self._waiters.setdefault(generation.loop, []).append(waiter)
        is_step = isinstance(output, Step | PendingStep)
        if is_step:
            generation.token_count += 1
        if not is_step or generation.token_count <= EAGER_TOKENS:
            self._urgent = True

    def flush_if_due(self) -> None:
        """Called after each step. Waits for `WAKE_INTERVAL_S` if there are only tokens to deliver."""
        if self._urgent or time.monotonic() - self._last_flush >= WAKE_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        self._urgent = False
        if not self._waiters:
            return
        self._last_flush = time.monotonic()
        waiters, self._waiters = self._waiters, {}
        for loop, pending in waiters.items():
            try:
                loop.call_soon_threadsafe(_wake, pending)
            except RuntimeError:  # the event loop is closed
                continue


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
