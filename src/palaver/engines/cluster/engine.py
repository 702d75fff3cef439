"""The engine that fronts use: generations run in replicas on a Ray cluster.

A replica that dies, is drained or can't be reached: the reply goes on at another one from its token ids, as after the
death of an engine process. `answer_now` is a new submission, too."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from cachetools import LRUCache

from palaver.engines.base import EngineInfo, EngineState, EngineStatus, check_capabilities, check_prompt
from palaver.engines.cluster.affinity import hash_key, routing_key
from palaver.engines.cluster.replica import content_frame, vocabulary_digest
from palaver.engines.core.media import MAX_EXPANSIONS
from palaver.engines.host.frames import Frame, decode_error_frame, decode_frames, encode_frame
from palaver.engines.host.supervisor import PendingOutputs, PendingRequest
from palaver.errors import BrokenModel, EngineClosed, EngineError, PalaverError, UnsupportedContent
from palaver.generation import AnswerRequested, Ended, Finish, MediaExpansion, MediaItem, Prompt
from palaver.phases import Vocabulary
from palaver.sampling import Sampling, check_sampling
from palaver.tracing import trace_span

DEPLOYMENT = "engine"
"""The deployment of each application."""
NAMESPACE = "palaver"
CONNECT_S = 60.0
"""How long the cluster and the first replica may take to answer when a model is loaded."""
QUERY_S = 10.0
RETRY_DELAYS_S = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""How long a reply waits before each attempt in a row that brought no token."""
_log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The stream of a replica broke."""


class ClusterGeneration(PendingOutputs):
    """An async context manager over the outputs of one reply. Leaving it cancels the request."""

    def __init__(self, engine: ClusterEngine, prompt: Prompt, sampling: Sampling, choice: int) -> None:
        super().__init__(PendingRequest(prompt, sampling, choice))
        self._engine = engine
        self._key = routing_key(prompt)
        self._wanted: set[str] = set()
        """Media that the replica asked for."""
        self._pump: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """The replica does everything."""

    async def __aenter__(self) -> ClusterGeneration:
        self._engine.open.add(self)
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finished = True
        self._engine.open.discard(self)
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])

    def stop(self) -> None:
        self.end(Ended(Finish.STOPPED))

    def end(self, output: Ended | PalaverError) -> None:
        """Cancels the request; this is its last output."""
        if self._pump is not None:
            self._pump.cancel()
        self._request.outputs.put(output)

    def answer_now(self) -> None:
        """Closes an open thought with the next token: what the replica computed meanwhile is dropped."""
        request = self._request
        if request.prompt.answer_at is not None or self._pump is None or self._pump.done():
            return
        request.add_output(AnswerRequested(len(request.prompt.reply_ids) + len(request.generated_ids)))
        self._pump = asyncio.create_task(self._run_after(self._pump))

    async def _run_after(self, before: asyncio.Task[None]) -> None:
        before.cancel()
        await asyncio.wait([before])
        await self._run()

    async def _run(self) -> None:
        request = self._request
        delays = iter(RETRY_DELAYS_S)
        while True:
            tokens = len(request.generated_ids)
            try:
                return await self._stream()
            except PalaverError as error:
                return request.outputs.put(error)
            except ReplicaLost as error:
                if len(request.generated_ids) > tokens:
                    delays = iter(RETRY_DELAYS_S)
                delay = next(delays, None)
                if delay is None:
                    lost = f"No replica of {self._engine.application!r} could go on with the reply: {error}"
                    return request.outputs.put(EngineError(f"{lost} It can be continued later."))
                _log.warning("a replica was lost turn=%s tokens=%d: %s", request.prompt.turn or "-", tokens, error)
                await asyncio.sleep(delay)

    async def _stream(self) -> None:
        """One submission, from the tokens so far. Returns when the reply has ended. Raises ReplicaLost."""
        contents = await asyncio.to_thread(self._load_contents) if self._wanted else []
        frames = [*contents, encode_frame(self._request.frame(0))]
        response = self._engine.handle("generate", stream=True).remote(b"".join(frames), key=self._key)
        try:
            with trace_span("cluster request", self._request.prompt.turn, model=self._engine.application):
                async for data in response:
                    for frame in decode_frames(data):
                        if self._handle(frame):
                            return
        except (PalaverError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ReplicaLost(_first_line(error)) from error
        finally:
            response.cancel()
        if not self._wanted:
            raise ReplicaLost("it ended the stream before the reply")
        await self._stream()

    def _handle(self, frame: Frame) -> bool:
        """Returns whether the reply has ended."""
        if "wants" in frame:
            if frame["wants"] in self._wanted:
                raise EngineError("The pictures and sounds of the request are more than a replica keeps at once.")
            self._wanted.add(frame["wants"])
            return False
        for _, sent in frame["outputs"]:
            if isinstance(sent, dict):
                raise decode_error_frame(sent)
            self._request.add_output(sent)
            if isinstance(sent, Ended):
                return True
        self._wanted.clear()
        return False

    def _load_contents(self) -> list[bytes]:
        items = {span.item.key: span.item for span in self._request.prompt.media}
        return [_encode_content(items[key]) for key in self._wanted]


class ClusterEngine:
    """The engine of one model on the cluster, in the caller's event loop."""

    def __init__(self, application: str, get_handle: Callable[[], Any], info: EngineInfo) -> None:
        """`get_handle`: the handle of its deployment."""
        self.application = application
        self._handle = get_handle()
        self._info = info
        self._closed = False
        self._expansions: LRUCache[str, MediaExpansion] = LRUCache(MAX_EXPANSIONS)
        self.open: set[ClusterGeneration] = set()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return (
            EngineStatus(EngineState.FAILED, str(EngineClosed())) if self._closed else EngineStatus(EngineState.READY)
        )

    def handle(self, method: str, stream: bool = False) -> Any:
        """Calls by value travel over gRPC: quicker, and the death of this process ends them."""
        return self._handle.options(method_name=method, stream=stream, _by_reference=False)

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> ClusterGeneration:
        if self._closed:
            raise EngineClosed
        check_capabilities(self._info, prompt, sampling, choice)
        check_prompt(self._info, prompt)
        return ClusterGeneration(self, prompt, check_sampling(sampling), choice)

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        known = self._expansions.get(item.key)
        if known is None:
            known = self._expansions[item.key] = self._expand(item)
        return known

    def _expand(self, item: MediaItem) -> MediaExpansion:
        if not self._info.media:
            raise UnsupportedContent(f"The model {self._info.model!r} takes text only.")
        request = encode_frame({"do": "expand", "number": 0, "item": replace(item, load=None)})
        for delay in RETRY_DELAYS_S:
            try:
                sent = self.handle("expand").remote(request, key=hash_key(item.key)).result(timeout_s=CONNECT_S)
            except Exception as error:
                _log.warning("a replica was lost: %s", error)
                time.sleep(delay)
                continue
            (frame,) = decode_frames(sent)
            if "refused" in frame:
                raise decode_error_frame(frame["refused"])
            if "expansion" in frame:
                return frame["expansion"]
            request = _encode_content(item) + request
        raise EngineError(f"No replica of {self.application!r} could take the {item.kind}.")

    async def metrics(self) -> dict[str, float]:
        """The sums over all replicas."""
        totals: dict[str, float] = {"running": 0.0}
        for figures in await self._ask_all("metrics"):
            for name, value in figures.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    async def forget(self, conversation: str) -> None:
        await self._ask_all("forget", conversation)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for generation in list(self.open):
            generation.end(EngineClosed())

    def warm_grammars(self) -> None:
        """The replicas do so."""

    async def _ask_all(self, method: str, *arguments: object) -> list[Any]:
        """The answers of all replicas; those that don't answer are left out."""
        count = await asyncio.to_thread(running_replicas, self.application)
        calls = (self._ask(method, place, *arguments) for place in range(count))
        return [answer for answer in await asyncio.gather(*calls) if answer is not None]

    async def _ask(self, method: str, place: int, *arguments: object) -> Any:
        response = self.handle(method).remote(*arguments, place=place)
        try:
            async with asyncio.timeout(QUERY_S):
                return await response
        except (Exception, asyncio.CancelledError) as error:
            response.cancel()
            if isinstance(error, asyncio.CancelledError):
                raise
            return None


def running_replicas(application: str) -> int:
    """How many replicas of the application run now. Blocks."""
    from ray import serve

    found = serve.status().applications.get(application)
    deployment = found.deployments.get(DEPLOYMENT) if found is not None else None
    return 0 if deployment is None else sum(n for state, n in deployment.replica_states.items() if state == "RUNNING")


def application_name(model: str) -> str:
    """The name of a model's application: that of the model, with dashes for what a path of an address can't hold."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-")


def parse_address(address: str) -> tuple[str, str]:
    """The cluster and the application of ray://HOST:PORT/APPLICATION. The cluster may be `auto`: that of this node."""
    parts = urlsplit(address)
    return parts.netloc, parts.path.strip("/")


def connect(cluster: str, seconds: float = CONNECT_S) -> None:
    """Makes this process a client of the cluster; the machine must be one of its nodes. Raises BrokenModel if it can't
    be reached for so long."""
    try:
        import ray
    except ImportError as error:
        raise BrokenModel("Ray is not installed: pip install 'palaver[cluster]'.") from error
    if ray.is_initialized():
        return
    begun = time.monotonic()
    while True:
        try:
            ray.init(cluster, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            return
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            if time.monotonic() - begun > seconds:
                reason = _first_line(error).rstrip(".")
                raise BrokenModel(
                    f"The Ray cluster at {cluster} can't be reached from this machine ({reason}). "
                    "The machine must be a node of it: palaver cluster join."
                ) from error
            time.sleep(1.0)


def load(address: str, vocabulary: Vocabulary) -> ClusterEngine:
    """The engine of an application on the cluster. Blocks until a replica is there. Raises BrokenModel."""
    cluster, application = parse_address(address)
    connect(cluster)
    from ray import serve

    def get_handle() -> Any:
        return serve.get_deployment_handle(DEPLOYMENT, application, _check_exists=False)

    handle = get_handle().options(method_name="describe", _by_reference=False)
    begun = time.monotonic()
    while True:
        try:
            (frame,) = decode_frames(handle.remote(key=0).result(timeout_s=CONNECT_S))
            break
        except Exception as error:
            if time.monotonic() - begun > CONNECT_S:
                reason = _first_line(error).rstrip(".:")
                raise BrokenModel(f"No replica of {application!r} answers at {address} ({reason}).") from error
            time.sleep(1.0)
    if frame["key"] != vocabulary_digest(vocabulary):
        raise BrokenModel(
            f"The replicas of {application!r} have another tokenizer than the model here: name the model that they run."
        )
    return ClusterEngine(application, get_handle, frame["ready"])


def _encode_content(item: MediaItem) -> bytes:
    assert item.load is not None
    return encode_frame(content_frame(item.key, item.load()))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
