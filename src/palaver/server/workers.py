"""Threads for long work: checking large bodies, tokenizing long texts, importing files.

A separate small pool, so that this work never takes the threads in which conversations are read and written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from palaver.memory import give_back_unused

P = ParamSpec("P")
T = TypeVar("T")
_TRIM_SECONDS = 2.0
"""The shortest time between two returns of memory to the system."""


class Workers:
    def __init__(self, threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(threads, "palaver-work")
        self._trimming: asyncio.Task[None] | None = None
        self._trim_due = False

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result. Work that has not started when its caller is cancelled never starts."""
        future = self._threads.submit(_without_stop_iteration, partial(work, *args, **kwargs))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    def trim(self) -> None:
        """Returns unused memory to the system soon. Call it after a request that used much of it."""
        self._trim_due = True
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(self._trim())

    async def _trim(self) -> None:
        while self._trim_due:
            await asyncio.sleep(_TRIM_SECONDS)  # the request's values are still referenced
            self._trim_due = False
            await self.run(give_back_unused)

    async def close(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
            await asyncio.gather(self._trimming, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _without_stop_iteration(work: Callable[[], T]) -> T:
    """A StopIteration can't be set on a future: its awaiter would wait for ever."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("a StopIteration was raised in a thread") from error
