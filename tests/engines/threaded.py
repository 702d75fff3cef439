"""A hosted engine in an event loop of its own: tests with different event loops can share it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from palaver.engines.base import EngineGeneration, EngineInfo, EngineStatus
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.generation import MediaExpansion, MediaItem, Output, Prompt
from palaver.sampling import Sampling

T = TypeVar("T")


class ThreadedGeneration:
    def __init__(self, engine: ThreadedEngine, generation: EngineGeneration) -> None:
        self._engine = engine
        self._generation = generation

    def __aiter__(self) -> ThreadedGeneration:
        return self

    async def __anext__(self) -> Output:
        try:
            return await self._engine.call(self._next())
        except EOFError:
            raise StopAsyncIteration from None

    async def _next(self) -> Output:
        try:
            return await anext(self._generation)
        except StopAsyncIteration:  # a future can't hold it
            raise EOFError from None

    def stop(self) -> None:
        self._engine.loop.call_soon_threadsafe(self._generation.stop)

    def answer_now(self) -> None:
        self._engine.loop.call_soon_threadsafe(self._generation.answer_now)


class ThreadedEngine:
    def __init__(self, spec: EngineSpec) -> None:
        """Blocks until the engine is ready."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.hosted = HostedEngine(spec)
        asyncio.run_coroutine_threadsafe(self.hosted.start(), self.loop).result()

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    @property
    def process_id(self) -> int | None:
        return self.hosted.process_id

    @property
    def info(self) -> EngineInfo:
        return self.hosted.info

    @property
    def status(self) -> EngineStatus:
        return self.hosted.status

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[ThreadedGeneration]:
        context = self.hosted.generate(prompt, sampling, choice)
        generation = await self.call(context.__aenter__())
        try:
            yield ThreadedGeneration(self, generation)
        finally:
            await self.call(context.__aexit__(None, None, None))

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        return self.hosted.expand_media(item)

    async def metrics(self) -> dict[str, float]:
        return await self.call(self.hosted.metrics())

    async def forget(self, conversation: str) -> None:
        await self.call(self.hosted.forget(conversation))

    async def close(self) -> None:
        await self.call(self.hosted.close())
