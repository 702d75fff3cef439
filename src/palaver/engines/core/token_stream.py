"""The engine over a token source: a library or a server that schedules and samples by itself, such as vLLM.

A source takes the ids of a prompt and streams tokens. The engine follows the reply (`ReplyState`): stop strings,
limits, thinking budgets. If a source can't force tokens, a thought is closed by a new submission behind the closing
tokens; `answer_now` and a connection that broke are a new submission, too."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

from cachetools import LRUCache

from palaver.engines.base import EngineInfo, EngineState, EngineStatus, check_capabilities, check_prompt
from palaver.engines.core.media import MediaCache, ProcessedMedia
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.sampler import not_a_number
from palaver.errors import EngineClosed, EngineError, PalaverError, QueueFull, UnsupportedContent
from palaver.generation import (
    AnswerRequested,
    Ended,
    Finish,
    MediaExpansion,
    MediaItem,
    Output,
    Prefilled,
    Prompt,
    Step,
    prefill_steps,
)
from palaver.phases import Vocabulary
from palaver.sampling import Sampling, check_sampling

MAX_OPEN = 1024
"""Requests that run or wait in the source at once."""
MAX_REMEMBERED = 100_000
"""Conversations whose owners are remembered, for `forget`."""
REPLAY_TOKENS = 256
"""Tokens of a continued reply that are replayed before other requests get their turn."""
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""How long a reply waits before each attempt to go on after its connection broke."""


class StreamLost(Exception):
    """The connection to the source broke. The reply goes on with a new submission."""


class SourceDied(Exception):
    """The source can't be used any more: its process must be started again."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One submission to a source."""

    number: int
    prompt: Prompt
    """`reply_ids` are all tokens of the reply so far."""
    sampling: Sampling
    choice: int
    max_tokens: int
    """Tokens that may still come."""
    stop_ids: frozenset[int]
    """Token ids that end the reply anywhere. The source should end with one."""
    salt: str
    """Cached prefixes are shared only between requests of the same salt."""
    media: Mapping[str, ProcessedMedia] = field(default_factory=dict)
    """The pictures and sounds of the prompt, by their keys."""

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt.context_ids, *self.prompt.reply_ids]


class TokenBackend(Protocol):
    @property
    def forces_tokens(self) -> bool:
        """Whether it closes thoughts itself, by `Sampling.thinking_budget` and `Prompt.answer_at`."""
        ...

    async def open(self) -> None:
        """Completes loading in the event loop that the source will be used in. Raises a ModelError."""
        ...

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raises BadParameter for what it can't do."""
        ...

    async def prepare(self, request: TokenRequest) -> None:
        """Does what precedes the submission, such as compiling grammars. Raises a PalaverError if that fails."""
        ...

    def stream(self, request: TokenRequest) -> AsyncGenerator[Prefilled | Step]:
        """`Prefilled`, then the tokens. Closing it aborts the request. Raises a PalaverError that fails the request,
        StreamLost or SourceDied."""
        ...

    async def metrics(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class StreamedGeneration:
    """An async context manager over the outputs of one reply. Leaving it aborts the request."""

    def __init__(self, engine: TokenStreamEngine, prompt: Prompt, sampling: Sampling, choice: int) -> None:
        self._engine = engine
        self._source = engine.source
        self._prompt = prompt
        self._sampling = sampling
        self._choice = choice
        self._reply: ReplyState | None = None
        """Set by `prepare`."""
        self._request: TokenRequest | None = None
        """The submission that is prepared and not streamed yet."""
        self._media: dict[str, ProcessedMedia] = {}
        self._outputs: asyncio.Queue[Output | PalaverError] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None
        self._reported_prefill = False
        self._unsent_ids: tuple[int, ...] = ()
        """Forced tokens that the reply has and the reader does not have yet. They are sent when a submission that
        follows them starts: one that ends before that leaves them to the next one."""
        self._finished = False

    async def prepare(self) -> None:
        """Restores the state of a continued reply and prepares its first submission."""
        if self._reply is not None:
            return
        check_prompt(self._engine.info, self._prompt)
        self._reply = await self._engine.restore(self._prompt, self._sampling)
        if self._reply.ended is None:
            await self._prepare_request()

    async def __aenter__(self) -> StreamedGeneration:
        self._engine.register(self)
        try:
            await self.prepare()
        except BaseException:
            self._engine.unregister(self)
            raise
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished = True
        self._engine.unregister(self)
        await self._cancel()

    def __aiter__(self) -> StreamedGeneration:
        return self

    async def __anext__(self) -> Output:
        if self._finished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, PalaverError):
            self._finished = True
            raise output
        self._finished = isinstance(output, Ended)
        return output

    def stop(self) -> None:
        """Ends the generation. Earlier outputs and `Ended` still arrive."""
        self.end(Ended(Finish.STOPPED))

    def end(self, output: Ended | PalaverError) -> None:
        """Aborts the request; this is its last output."""
        if self._pump is not None:
            self._pump.cancel()
        self._outputs.put_nowait(output)

    def answer_now(self) -> None:
        """Closes an open thought with the next token: what the source computed meanwhile is dropped."""
        if self._reply is None or self._reply.ended is not None or self._pump is None or self._pump.done():
            return
        position = self._reply.answer_now()
        self._outputs.put_nowait(AnswerRequested(position))
        self._prompt = replace(self._prompt, answer_at=position)
        self._pump = asyncio.create_task(self._run_after(self._pump))

    async def _cancel(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])

    async def _run_after(self, before: asyncio.Task[None]) -> None:
        before.cancel()
        await asyncio.wait([before])
        self._request = None
        await self._run()

    async def _run(self) -> None:
        try:
            async for output in self._generate():
                self._outputs.put_nowait(output)
        except PalaverError as error:
            self._outputs.put_nowait(error)
        except SourceDied as error:
            self._outputs.put_nowait(self._engine.fail(error))
        except Exception as error:  # fails the request, not the engine
            self._outputs.put_nowait(EngineError(f"The engine failed ({type(error).__name__}: {error})."))

    async def _generate(self) -> AsyncIterator[Output]:
        reply = self._reply
        assert reply is not None
        delays = iter(RETRY_DELAYS_S)
        while reply.ended is None:
            forced = () if self._source.forces_tokens else reply.forced_ids
            before = len(reply.token_ids)
            for token_id in forced:
                reply.append_token(token_id)
            if forced:
                self._unsent_ids += tuple(reply.token_ids[before:])
                self._request = None
            if reply.ended is not None:
                for one in self._start(Prefilled(len(self._prompt), 0)):
                    yield one
                break
            try:
                async with aclosing(self._stream()) as outputs:
                    async for output in outputs:
                        delays = iter(RETRY_DELAYS_S)
                        yield output
            except StreamLost as error:
                delay = next(delays, None)
                if delay is None:
                    raise EngineError(f"{error} The reply can be continued later.") from error
                await asyncio.sleep(delay)
        yield reply.ended

    async def _stream(self) -> AsyncGenerator[Output]:
        """One submission, to the end of the reply or the next forced token."""
        reply = self._reply
        assert reply is not None
        request = self._request or await self._prepare_request()
        self._request = None
        async with aclosing(self._source.stream(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Prefilled):
                    for one in self._start(output):
                        yield one
                    continue
                if math.isnan(output.logprob):
                    raise not_a_number()
                reply.append_token(output.token_id)
                yield output
                if reply.ended is not None or (reply.forced_ids and not self._source.forces_tokens):
                    return
        raise StreamLost("The engine ended the reply before its end.")

    def _start(self, prefilled: Prefilled) -> tuple[Output, ...]:
        """The outputs at the start of a submission: `Prefilled` of the first one only, and the unsent tokens."""
        reported, self._reported_prefill = self._reported_prefill, True
        forced, self._unsent_ids = self._unsent_ids, ()
        return (*(() if reported else (prefilled,)), *prefill_steps(forced))

    async def _prepare_request(self) -> TokenRequest:
        assert self._reply is not None
        for span in self._prompt.media:
            if span.item.key not in self._media:
                self._media[span.item.key] = await self._engine.load_media(span.item)
        request = self._engine.request(self._prompt, self._sampling, self._choice, self._reply)
        self._request = replace(request, media=self._media)
        await self._source.prepare(self._request)
        return self._request


class TokenStreamEngine:
    """Generates token ids with a source, in the caller's event loop."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        source: TokenBackend,
        on_failure: Callable[[BaseException], None] | None = None,
        media: MediaCache | None = None,
    ) -> None:
        """`on_failure` is called when the source can't be used any more. `media`: those that `info` names; None if it
        takes text only."""
        self._info = info
        self._media = media
        self._vocabulary = vocabulary
        self.source = source
        self._on_failure = on_failure
        self._numbers = itertools.count()
        self._open: set[StreamedGeneration] = set()
        self._exit_reason: PalaverError | None = None
        self._owners: LRUCache[str, frozenset[str]] = LRUCache(MAX_REMEMBERED)
        """The owners whose requests named a conversation."""
        self._epochs: dict[str, int] = {}
        """How often caches of an owner were forgotten: a part of the salt, so that no entry is found again."""

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        reason = self._exit_reason
        return EngineStatus(EngineState.READY) if reason is None else EngineStatus(EngineState.FAILED, str(reason))

    async def open(self) -> None:
        """Completes loading. Raises a ModelError."""
        await self.source.open()

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> StreamedGeneration:
        if self._exit_reason is not None:
            raise self._exit_reason
        check_capabilities(self._info, prompt, sampling, choice)
        self.source.check(prompt, check_sampling(sampling))
        return StreamedGeneration(self, prompt, sampling, choice)

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        if self._media is None:
            raise UnsupportedContent(f"The engine of the model {self._info.model!r} takes text only.")
        return self._media.expand(item)

    async def metrics(self) -> dict[str, float]:
        return {"running": len(self._open), **await self.source.metrics()}

    async def forget(self, conversation: str) -> None:
        """A source has no cache by conversation: all that is cached of its owners is not found again."""
        for owner in self._owners.pop(conversation, ()):
            self._epochs[owner] = self._epochs.get(owner, 0) + 1

    async def close(self) -> None:
        if self._exit_reason is None:
            self._end(EngineClosed())
            await self.source.close()

    def warm_grammars(self) -> None:
        """The source does so itself."""

    def fail(self, error: SourceDied) -> PalaverError:
        """Called when the source can't be used any more. Returns what requests get."""
        if self._exit_reason is None:
            if self._on_failure is not None:
                self._on_failure(error)
            self._end(EngineError(f"The engine died: {error}"))
        assert self._exit_reason is not None
        return self._exit_reason

    def _end(self, reason: PalaverError) -> None:
        self._exit_reason = reason
        for generation in list(self._open):
            generation.end(reason)

    # for generations

    def register(self, generation: StreamedGeneration) -> None:
        if self._exit_reason is not None:
            raise self._exit_reason
        if len(self._open) >= MAX_OPEN:
            raise QueueFull(len(self._open))
        self._open.add(generation)

    def unregister(self, generation: StreamedGeneration) -> None:
        self._open.discard(generation)

    async def load_media(self, item: MediaItem) -> ProcessedMedia:
        assert self._media is not None, "media are refused by models that don't take them"
        return await asyncio.to_thread(self._media.load, item)

    async def restore(self, prompt: Prompt, sampling: Sampling) -> ReplyState:
        """The state of a reply after its tokens so far."""
        empty = replace(prompt, reply_ids=())
        reply = ReplyState(empty, sampling, self._vocabulary, self._info.end_ids, self._info.context_length)
        for number, token_id in enumerate(prompt.reply_ids, 1):
            reply.append_token(token_id)
            if number % REPLAY_TOKENS == 0:
                await asyncio.sleep(0)
        return reply

    def request(self, prompt: Prompt, sampling: Sampling, choice: int, reply: ReplyState) -> TokenRequest:
        prompt = replace(prompt, reply_ids=tuple(reply.token_ids))
        limit = self._info.context_length - len(prompt)
        max_tokens = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens - len(prompt.reply_ids))
        salt = self._salt(prompt)
        return TokenRequest(next(self._numbers), prompt, sampling, choice, max_tokens, reply.always_stop_ids, salt)

    def _salt(self, prompt: Prompt) -> str:
        if prompt.conversation:
            owners = self._owners.get(prompt.conversation, frozenset())
            self._owners[prompt.conversation] = owners | {prompt.owner}
        return f"{prompt.owner}\n{prompt.adapter}\n{self._epochs.get(prompt.owner, 0)}"
