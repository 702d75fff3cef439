"""The state that all routes of one server share, and its FastAPI dependencies.

Indexes of earlier replies serve clients that send a conversation back without its ids. Long work (checking large
bodies, tokenizing long texts, importing files) has a small pool of threads of its own, so that it never takes the
threads in which conversations are read and written.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

from cachetools import LRUCache, TLRUCache
from fastapi import Depends, Header, Request

from palaver.chat.attachments import AttachmentReader
from palaver.chat.interface import ServerChat
from palaver.chat.model import Model
from palaver.chat.service import Service
from palaver.errors import BadParameter
from palaver.memory import give_back_unused
from palaver.messages import Audio, Image, Message, Role, Text, Thinking, ToolCall, Video
from palaver.server.auth import Authenticator, CallerDep
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics
from palaver.server.openai.schemas import ChatMessage
from palaver.server.settings import ServerSettings
from palaver.server.socket.registry import SocketRegistry
from palaver.store import Store, StoreError
from palaver.voice.speech import SpeakerCache

MAX_TOKENS = 4_000_000
"""Of all replies in the reply index together. The least recently used is evicted first."""
MAX_RESPONSES = 50_000
"""The size of the response index; the least recently used reply is evicted first."""
MAX_TRANSCRIPTS = 1000


class ReplyIndex:
    """Token ids of replies by owner, earlier messages and text, so that the prefix cache hits.

    The caller uses them only if the template renders the same bytes.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._replies: LRUCache[bytes, tuple[int, ...]] = LRUCache(max_tokens, getsizeof=len)

    def add(self, owner: str, before: Sequence[Message], reply: Message, ids: tuple[int, ...]) -> None:
        *_, key = message_digests(owner, (*before, reply))
        if len(ids) <= self._replies.maxsize:
            self._replies[key] = ids

    def lookup(
        self, owner: str, messages: Sequence[Message], sent: Sequence[tuple[int, ...] | None]
    ) -> tuple[tuple[int, ...] | None, ...]:
        """The ids of the replies among the messages: those that were sent, else those of the index."""
        keys = [
            key
            for key, message in zip(message_digests(owner, messages), messages, strict=True)
            if message.role is Role.ASSISTANT
        ]
        return tuple(ids or self._replies.get(key) for ids, key in zip(sent, keys, strict=True))


class ResponseIndex:
    """LRU index of stored responses, by the digest of the reply and all messages before it."""

    def __init__(self, max_replies: int = MAX_RESPONSES) -> None:
        self._replies: LRUCache[bytes, str] = LRUCache(max_replies)

    def add(self, owner: str, branch: Sequence[Message], reply: str) -> None:
        """`branch` ends with the reply."""
        *_, key = message_digests(owner, branch)
        self._replies[key] = reply

    def find(self, owner: str, messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
        """Yields the indexed replies among the messages, the last first, each with the count of messages up to it."""
        keys = list(message_digests(owner, messages))
        for index in reversed(range(len(messages))):
            reply = self._replies.get(keys[index]) if messages[index].role is Role.ASSISTANT else None
            if reply is not None:
                yield reply, index + 1


@dataclass(frozen=True, slots=True)
class _Transcript:
    text: str
    expires_at: int


class TranscriptIndex:
    """The text of spoken replies by owner and recording id."""

    def __init__(self) -> None:
        self._transcripts: TLRUCache[tuple[str, str], _Transcript] = TLRUCache(
            MAX_TRANSCRIPTS, ttu=lambda _, transcript, now: transcript.expires_at, timer=time.time
        )

    def add(self, owner: str, recording_id: str, expires_at: int, text: str) -> None:
        self._transcripts[owner, recording_id] = _Transcript(text, expires_at)

    def resolve(self, owner: str, messages: Sequence[ChatMessage]) -> None:
        """Replaces the recordings in the messages by their transcripts."""
        for index, message in enumerate(messages):
            if message.audio is None:
                continue
            transcript = self._transcripts.get((owner, message.audio.id))
            if transcript is None:
                name = f"messages[{index}].audio.id"
                raise BadParameter(name, message.audio.id, "there is no such recording, or it has expired")
            if not message.content:
                message.content = transcript.text
            message.audio = None


def canonical_arguments(arguments: str) -> str:
    """The arguments of a call in one spelling: some clients send them back reformatted."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def message_digests(owner: str, messages: Sequence[Message]) -> Iterator[bytes]:
    """A digest for each message and all before it. Thinking does not count, because clients leave it out."""
    digest = hashlib.sha256(owner.encode())
    for message in messages:
        digest.update(f"\0{message.role}".encode())
        for part in message.parts:
            match part:
                case Thinking():
                    pass
                case Text(text):
                    digest.update(text.encode("utf-8", "surrogatepass"))
                case ToolCall(_, name, arguments):
                    digest.update(f"\1{name}\2{canonical_arguments(arguments)}".encode("utf-8", "surrogatepass"))
                case Image() | Audio() | Video():
                    digest.update(f"\3{part.digest}".encode())
                case _:
                    digest.update(repr(part).encode("utf-8", "surrogatepass"))
        yield digest.digest()


P = ParamSpec("P")
T = TypeVar("T")
_TRIM_SECONDS = 2.0
"""The shortest time between two returns of memory to the system."""


class Workers:
    """Threads for long work."""

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


_TIMEOUT_SECONDS = 2.0


class DatabaseProbe:
    """A health check of the database. It runs one query at a time, whose result all waiting checks get."""

    def __init__(self) -> None:
        self._query: asyncio.Task[None] | None = None

    async def failure(self, store: Store) -> str:
        """Why the database can't be read, or an empty string."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(asyncio.to_thread(store.check))
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await asyncio.shield(self._query)
        except TimeoutError:
            return f"The database did not answer within {_TIMEOUT_SECONDS:g} s."
        except StoreError as error:
            return str(error)
        return ""


@dataclass(frozen=True, slots=True)
class ServerState:
    service: Service
    settings: ServerSettings
    metrics: Metrics
    limiter: ConcurrencyLimiter
    authenticator: Authenticator
    sockets: SocketRegistry
    reply_index: ReplyIndex = field(default_factory=ReplyIndex)
    speakers: SpeakerCache = field(default_factory=SpeakerCache)
    workers: Workers = field(default_factory=Workers)
    transcripts: TranscriptIndex = field(default_factory=TranscriptIndex)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server starts to shut down: it ends streams that would otherwise stay open."""
    database_probe: DatabaseProbe = field(default_factory=DatabaseProbe)
    response_index: ResponseIndex = field(default_factory=ResponseIndex)
    fetch_media: Callable[[str], bytes] | None = None
    """Downloads media from other addresses, if the operator allows it."""
    response_watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By reply id: the tasks that watch running responses."""
    background_tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def model(self, name: str | None = None) -> Model:
        """The model of that name, loaded if necessary; without a name, the one in use. Raises ModelNotOffered."""
        return await self.service.models.get(self.model_name(name))

    def model_name(self, name: str | None) -> str:
        """The name as the models have it; empty for the one in use."""
        return "" if name is None or name in self.settings.aliases else name

    def attachments(self, model: Model | None = None) -> AttachmentReader:
        """Reads the files that clients attach. With a model: only media that it accepts."""
        if model is None:
            return AttachmentReader(self.service.media, fetch=self.fetch_media)
        accepts = model.engine.info.media
        return AttachmentReader(self.service.media, model.name, accepts, self.fetch_media, model.text_only)


async def get_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.palaver
    return state


async def get_service(request: Request) -> Service:
    return (await get_state(request)).service


async def get_closing(request: Request) -> asyncio.Event:
    return (await get_state(request)).closing


StateDep = Annotated[ServerState, Depends(get_state)]
ServiceDep = Annotated[Service, Depends(get_service)]
ClosingDep = Annotated[asyncio.Event, Depends(get_closing)]


async def caller_chat(caller: CallerDep, service: ServiceDep) -> ServerChat:
    return service.chat(caller.owner_id)


async def _idempotency_header(idempotency_key: Annotated[str | None, Header()] = None) -> str | None:
    return idempotency_key


ChatDep = Annotated[ServerChat, Depends(caller_chat)]
IdempotencyKeyDep = Annotated[str | None, Depends(_idempotency_header)]


def idempotency_key(field: str | None, header: str | None) -> str | None:
    """The key from the body's field or the header. Raises BadParameter if they differ."""
    if field is not None and header is not None and field != header:
        raise BadParameter("key", field, "differs from the header Idempotency-Key")
    return header if field is None else field
