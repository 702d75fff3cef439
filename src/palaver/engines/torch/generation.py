"""One generation as its owner sees it: outputs from the worker's thread, read in the owner's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType

from palaver.errors import PalaverError
from palaver.generation import Ended, Output, Prompt
from palaver.sampling import Sampling

Arrival = Output | PalaverError


class Generation:
    """An async context manager over its own outputs. Leaving it cancels what is still running, within one step."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        post: Callable[[Command], None],
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.choice = choice
        self.loop: asyncio.AbstractEventLoop
        self._post = post
        self._ready = ready
        self._arrivals: deque[Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    async def __aenter__(self) -> Generation:
        self.loop = asyncio.get_running_loop()
        if self._ready is not None:
            await self._ready()
        self._post(Submit(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            self._over = True
            self._post(Cancel(self))

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Output:
        if self._over:
            raise StopAsyncIteration
        while not self._arrivals:
            self._waiter = self.loop.create_future()
            await self._waiter
        arrival = self._arrivals.popleft()
        if isinstance(arrival, PalaverError):
            self._over = True
            raise arrival
        self._over = isinstance(arrival, Ended)
        return arrival

    def stop(self) -> None:
        """Ends it within one step; what was said before, and `Ended`, still arrive."""
        self._post(Cancel(self))

    def answer_now(self) -> None:
        """Closes an open thought with the next token."""
        self._post(AnswerNow(self))

    def arrive(self, arrival: Arrival) -> None:
        """Called in the owner's loop."""
        self._arrivals.append(arrival)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Submit:
    __slots__ = ("generation",)

    def __init__(self, generation: Generation) -> None:
        self.generation = generation


class Cancel(Submit):
    __slots__ = ()


class AnswerNow(Submit):
    __slots__ = ()


class Close:
    __slots__ = ()


Command = Submit | Cancel | AnswerNow | Close


class Outbox:
    """What a step produced, handed over once for each event loop rather than once for each token."""

    def __init__(self) -> None:
        self._items: list[tuple[Generation, Arrival]] = []

    def put(self, generation: Generation, *arrivals: Arrival) -> None:
        self._items.extend((generation, arrival) for arrival in arrivals)

    def send(self) -> None:
        if not self._items:
            return
        items, self._items = self._items, []
        loops = {id(generation.loop): generation.loop for generation, _ in items}
        for key, loop in loops.items():
            mine = [item for item in items if id(item[0].loop) == key]
            try:
                loop.call_soon_threadsafe(_arrive, mine)
            except RuntimeError:  # its loop is gone, so nobody reads these any more
                continue


def _arrive(items: Iterable[tuple[Generation, Arrival]]) -> None:
    for generation, arrival in items:
        generation.arrive(arrival)
