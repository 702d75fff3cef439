"""A replica: an engine host behind Ray Serve. Requests and outputs are the frames of the engine process, outputs in
batches of a few milliseconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

from cachetools import LRUCache

from palaver.engines.base import Engine, EngineState
from palaver.engines.host.frames import Frame, OutputFrame, decode_frames, encode_error, encode_frame
from palaver.errors import EngineError, PalaverError
from palaver.generation import MediaContent, MediaItem, Prompt, Step
from palaver.phases import Vocabulary

if TYPE_CHECKING:
    from palaver.sampling import Sampling

LoadEngine: TypeAlias = Callable[[], Awaitable[tuple[Engine, Vocabulary]]]
BATCH_S, MIN_BATCH_S, MAX_BATCH_S = 0.006, 0.008, 0.048
"""Tokens of one reply that come within this time travel together: so long for each open request, within these limits.
The first ones, also after a pause, do not wait."""
MEDIA_BYTES = 256 << 20
"""Decoded pictures and sounds that are kept, so that the next turn does not send them again."""
CACHE_USED, CACHE_LIMIT, CACHE_KEPT = "used_bytes", "limit_bytes", "kept_bytes"
_log = logging.getLogger("palaver.replica")


def vocabulary_digest(vocabulary: Vocabulary) -> str:
    """Equal if the token ids mean the same."""
    digest = sha256()
    for token in vocabulary:
        digest.update(len(token).to_bytes(4, "big") + token)
    return digest.hexdigest()


class EngineReplica:
    """The class of the deployment. Ray calls `check_health` and the `record_` methods."""

    async def __init__(self, model: str, version: str, load: LoadEngine) -> None:  # type: ignore[misc]  # Ray awaits it
        """`version`: of what determines the engine. Replicas of the same one must have the same fingerprint."""
        from palaver.engines.cluster.telemetry import ReplicaTelemetry

        self._model = model
        self._version = version
        self._engine, vocabulary = await load()
        self._vocabulary = vocabulary_digest(vocabulary)
        self._contents: LRUCache[str, MediaContent] = LRUCache(MEDIA_BYTES, getsizeof=lambda one: len(one.data))
        self._open = 0
        self._reports = 0
        self._telemetry = ReplicaTelemetry(model)
        _check_fingerprint(model, version, self._engine.info.fingerprint)
        _log.info("a replica of %s is ready: %s", model, self._engine.info.fingerprint)

    async def describe(self, key: int = 0) -> bytes:
        """The engine's description, with the digest of its vocabulary."""
        return encode_frame({"ready": self._engine.info, "key": self._vocabulary})

    async def generate(self, request: bytes, key: int = 0) -> AsyncGenerator[bytes]:
        """Streams the outputs of a request. If content is missing, the only answer is `wants`: the request is sent
        again with it. Ending the stream cancels the generation."""
        *contents, frame = decode_frames(request)
        for one in contents:
            self._contents[one["key"]] = one["content"]
        prompt = frame["prompt"]
        missing = [span.item.key for span in prompt.media if span.item.key not in self._contents]
        if missing:
            yield b"".join(encode_frame({"wants": one, "number": 0}) for one in missing)
            return
        self._open += 1
        try:
            with self._telemetry.request(prompt.turn) as observed:
                batches = _Batches(self._engine, self._with_contents(prompt), frame["sampling"], frame["choice"])
                async for outputs in batches.run(lambda: max(MIN_BATCH_S, min(MAX_BATCH_S, BATCH_S * self._open))):
                    observed.count(outputs)
                    yield encode_frame({"outputs": [(0, output) for output in outputs]})
        finally:
            self._open -= 1

    async def expand(self, request: bytes, key: int = 0) -> bytes:
        *contents, frame = decode_frames(request)
        for one in contents:
            self._contents[one["key"]] = one["content"]
        item = frame["item"]
        if item.key not in self._contents:
            return encode_frame({"wants": item.key, "number": 0})
        try:
            expansion = await asyncio.to_thread(self._engine.expand_media, self._with_content(item))
        except PalaverError as error:
            return encode_frame({"refused": encode_error(error), "number": 0})
        return encode_frame({"expansion": expansion, "number": 0})

    async def metrics(self, key: int = 0, place: int = 0) -> dict[str, float]:
        figures = await self._engine.metrics()
        self._telemetry.set_figures(figures, self._open)
        return {**figures, "open": self._open}

    async def forget(self, conversation: str, key: int = 0, place: int = 0) -> None:
        await self._engine.forget(conversation)

    def record_routing_stats(self) -> dict[str, float]:
        """What routers know of this replica. Reports are numbered, so that a router knows a new one."""
        self._reports += 1
        return {"report": self._reports, "load": self._open}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The pressure on the cache, from 0 to 1: what running requests hold of it."""
        figures = await self._engine.metrics()
        self._telemetry.set_figures(figures, self._open)
        held = figures.get(CACHE_USED, 0.0) - figures.get(CACHE_KEPT, 0.0)
        return {"cache_pressure": held / limit if (limit := figures.get(CACHE_LIMIT, 0.0)) else 0.0}

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises. An engine process that starts again is no reason."""
        status = self._engine.status
        if status.state is EngineState.FAILED:
            raise RuntimeError(status.reason)
        _check_fingerprint(self._model, self._version, self._engine.info.fingerprint)

    async def __del__(self) -> None:
        """Called by Ray when the replica is drained."""
        if hasattr(self, "_engine"):
            await self._engine.close()

    def _with_contents(self, prompt: Prompt) -> Prompt:
        spans = (replace(span, item=self._with_content(span.item)) for span in prompt.media)
        return replace(prompt, media=tuple(spans))

    def _with_content(self, item: MediaItem) -> MediaItem:
        content = self._contents[item.key]
        return replace(item, load=lambda: content)


class _Batches:
    """The outputs of one generation, those of a few milliseconds together."""

    def __init__(self, engine: Engine, prompt: Prompt, sampling: Sampling, choice: int) -> None:
        self._engine = engine
        self._request = (prompt, sampling, choice)
        self._outputs: list[OutputFrame] = []
        self._changed = asyncio.Event()

    async def run(self, interval: Callable[[], float]) -> AsyncGenerator[list[OutputFrame]]:
        """`interval`: for how many seconds tokens are collected."""
        pump = asyncio.create_task(self._pump())
        due = 0.0
        try:
            while True:
                await self._changed.wait()
                if not pump.done() and (wait := due - time.monotonic()) > 0:
                    await asyncio.wait([pump], timeout=wait)
                self._changed.clear()
                ended, outputs, self._outputs = pump.done(), self._outputs, []
                if outputs:
                    if any(isinstance(output, Step) for output in outputs):
                        due = time.monotonic() + interval()
                    yield outputs
                if ended:
                    return
        finally:
            pump.cancel()
            await asyncio.wait([pump])

    async def _pump(self) -> None:
        try:
            async with self._engine.generate(*self._request) as generation:
                async for output in generation:
                    self._outputs.append(output)
                    self._changed.set()
        except PalaverError as error:
            self._outputs.append(encode_error(error))
        except Exception as error:  # fails the request, not the replica
            _log.exception("a request failed")
            self._outputs.append(encode_error(EngineError(f"The engine failed ({type(error).__name__}: {error}).")))
        finally:
            self._changed.set()


def _check_fingerprint(model: str, version: str, fingerprint: str) -> None:
    """Raises EngineError if another replica of the deployment computes with other code: replies could not go on there
    exactly. The first replica's counts. It is kept in Ray's own key-value store."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    key = f"palaver/fingerprint/{model}/{version}".encode()
    _internal_kv_put(key, fingerprint.encode(), overwrite=False)
    first = (_internal_kv_get(key) or b"").decode()
    if first != fingerprint:
        raise EngineError(
            f"The engine of {model!r} is {fingerprint} here and {first} in other replicas: put replicas of one model "
            "on machines of one kind, or deploy it under two names."
        )


def content_frame(key: str, content: MediaContent) -> Frame:
    return {"do": "content", "number": 0, "key": key, "content": content}
