"""One generation as its owner sees it: outputs from the worker's thread, read in the owner's event loop."""

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

PACE = 0.008
"""Seconds. Tokens that come quicker than this are handed over together: waking a reader costs as much as sampling."""
SOON = 4
"""So many tokens of a reply are handed over at once all the same: the first are seldom text that shows."""

Arrival = Output | PalaverError


class TorchGeneration:
    """An async context manager over its own outputs. Leaving it cancels what is still running, within one step."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        post: Callable[[Command], None],
        ready: Callable[[], Awaitable[None]] | None = None,
        grammars: Mapping[Constraint, CompiledGrammar] | None = None,
    ) -> None:
        """`ready` is awaited before the request is submitted; it fills `grammars`."""
        self.prompt = prompt
        self.sampling = sampling
        self.choice = choice
        self.grammars = {} if grammars is None else grammars
        self.loop: asyncio.AbstractEventLoop
        self._post = post
        self._ready = ready
        self._arrivals: deque[Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None
        """Set while its owner has nothing left to read."""
        self._over = False
        self.steps = 0
        """How many tokens have come of it."""

    async def __aenter__(self) -> TorchGeneration:
        self.loop = asyncio.get_running_loop()
        if self._ready is not None:
            await self._ready()
        self._post(SubmitCommand(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            self._over = True
            self._post(CancelCommand(self))

    def __aiter__(self) -> TorchGeneration:
        return self

    async def __anext__(self) -> Output:
        if self._over:
            raise StopAsyncIteration
        while not self._arrivals:
            self._waiter = waiter = self.loop.create_future()
            if not self._arrivals:  # looked at again: what came before the waiter was there wakes nobody
                await waiter
        arrival = self._arrivals.popleft()
        if isinstance(arrival, PalaverError):
            self._over = True
            raise arrival
        self._over = isinstance(arrival, Ended)
        return arrival

    def stop(self) -> None:
        """Ends it within one step; what was said before, and `Ended`, still arrive."""
        self._post(CancelCommand(self))

    def answer_now(self) -> None:
        """Closes an open thought with the next token."""
        self._post(AnswerNowCommand(self))

    def arrive(self, arrival: Arrival) -> asyncio.Future[None] | None:
        """Called in any thread. Returns who waits for it, to be woken in the owner's loop."""
        self._arrivals.append(arrival)
        waiter, self._waiter = self._waiter, None
        return waiter


class SubmitCommand:
    __slots__ = ("generation",)

    def __init__(self, generation: TorchGeneration) -> None:
        self.generation = generation


class CancelCommand(SubmitCommand):
    __slots__ = ()


class AnswerNowCommand(SubmitCommand):
    __slots__ = ()


class ForgetCommand:
    """`done` is called in the worker's thread once what it keeps of the conversation is freed, or nothing runs."""

    __slots__ = ("conversation", "done")

    def __init__(self, conversation: str, done: Callable[[], None]) -> None:
        self.conversation = conversation
        self.done = done


class CloseCommand:
    __slots__ = ()


Command = SubmitCommand | CancelCommand | AnswerNowCommand | ForgetCommand | CloseCommand


class Outbox:
    """Hands over what steps produced. An event loop is woken only where somebody waits, and once for all of them."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self._urgent = False
        self._sent = 0.0

    def put(self, generation: TorchGeneration, arrival: Arrival) -> None:
        waiter = generation.arrive(arrival)
        if waiter is not None:
            self._waiters.setdefault(generation.loop, []).append(waiter)
        if isinstance(arrival, Step):
            generation.steps += 1
        if not isinstance(arrival, Step) or generation.steps <= SOON:
            self._urgent = True

    def send_in_time(self) -> None:
        """After a step: at once, unless it is only tokens that come quicker than anybody reads."""
        if self._urgent or time.monotonic() - self._sent >= PACE:
            self.send()

    def send(self) -> None:
        self._urgent = False
        if not self._waiters:
            return
        self._sent = time.monotonic()
        waiters, self._waiters = self._waiters, {}
        for loop, waiting in waiters.items():
            try:
                loop.call_soon_threadsafe(wake, waiting)
            except RuntimeError:  # its loop is gone, so nobody reads these any more
                continue


def wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
