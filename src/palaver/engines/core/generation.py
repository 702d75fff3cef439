"""One generation: outputs that the worker's thread produces and the caller's event loop reads.

The caller sends commands (submit, cancel, answer now) to the worker; the outbox wakes the callers that wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from palaver.constraints import Constraint
from palaver.engines.core.media import MissingMedia, ProcessedMedia
from palaver.engines.grammars import CompiledGrammar
from palaver.errors import PalaverError
from palaver.generation import AnswerRequested, Ended, Finish, MediaItem, Output, Prefilled, Prompt, Step
from palaver.sampling import Sampling

MIN_WAKE_INTERVAL_S, MAX_WAKE_INTERVAL_S = 0.008, 0.032
"""Readers are woken at most this often while only tokens arrive: waking a reader costs as much as sampling."""
WAKE_INTERVAL_PER_READER_S = 0.001
"""Many readers are woken more seldom, with more tokens each, so that waking them takes a bounded share of the time."""
EAGER_TOKENS = 4
"""The first tokens of a reply wake their reader at once: they are seldom visible text."""


class StepTable(Protocol):
    """The results of a batch."""

    def read_step(self, row: int) -> Step: ...


class PendingStep:
    """A step whose results are not read yet, but for its token. The reader of the reply reads them, so that the
    worker's thread can start the next pass."""

    __slots__ = ("_row", "_table", "token_id")

    def __init__(self, token_id: int, table: StepTable, row: int) -> None:
        self.token_id = token_id
        self._table = table
        self._row = row

    def build(self) -> Step:
        return self._table.read_step(self._row)


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
        load_media: Callable[[MediaItem], ProcessedMedia] | None = None,
    ) -> None:
        """`prepare` is awaited before the request is submitted; it fills `grammars`. `load_media` loads an item of the
        prompt; it blocks."""
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
        self._stopped = self._answers_now = False
        self._load_media = load_media
        self.media: dict[str, ProcessedMedia] = {}
        """Items that had to be loaded, by key."""
        self._reported_prefill = False
        self._generated_ids: list[int] = []
        """With media only: the tokens to submit the request with if an item has to be loaded again."""
        self.token_count = 0
        """Tokens generated so far."""

    async def prepare(self) -> None:
        """Does what precedes the submission, such as compiling grammars. Entering the context calls it, too."""
        prepare, self._prepare = self._prepare, None
        if prepare is not None:
            await prepare()

    async def __aenter__(self) -> LocalGeneration:
        self.loop = asyncio.get_running_loop()
        await self.prepare()
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
        output = await self._next_output()
        while self._load_media is not None and not self._follow(output):
            if isinstance(output, MissingMedia):
                await self._load_missing(output)
            output = await self._next_output()
        if isinstance(output, PendingStep):
            return output.build()
        if isinstance(output, PalaverError):
            self._finished = True
            raise output
        self._finished = isinstance(output, Ended)
        return output

    async def _next_output(self) -> OutputOrError:
        while not self._outputs:
            self._waiter = waiter = self.loop.create_future()
            if not self._outputs:  # an output that was pushed before the waiter was set wakes no reader
                await waiter
        return self._outputs.popleft()

    def _follow(self, output: OutputOrError) -> bool:
        """Records what a second submission needs. Returns whether the output is for the reader."""
        if isinstance(output, MissingMedia):
            return False
        if isinstance(output, Prefilled):
            reported, self._reported_prefill = self._reported_prefill, True
            return not reported
        if isinstance(output, Step | PendingStep):
            self._generated_ids.append(output.token_id)
        elif isinstance(output, AnswerRequested):
            self.prompt = replace(self.prompt, answer_at=output.position)
        return True

    async def _load_missing(self, missing: MissingMedia) -> None:
        """Loads items and submits the request again, from the tokens it has."""
        assert self._load_media is not None
        items = {span.item.key: span.item for span in self.prompt.media}
        for key in missing.keys:
            self.media[key] = await asyncio.to_thread(self._load_media, items[key])
        reply_ids = (*self.prompt.reply_ids, *self._generated_ids)
        self.prompt = replace(self.prompt, reply_ids=reply_ids)
        self._generated_ids = []
        if self._stopped:
            self._outputs.append(Ended(Finish.STOPPED))
            return
        self._post(SubmitCommand(self))
        if self._answers_now and self.prompt.answer_at is None:  # it was ignored meanwhile
            self._post(AnswerNowCommand(self))

    def stop(self) -> None:
        """Ends the generation within one step. Earlier outputs and `Ended` still arrive."""
        self._stopped = True
        self._post(CancelCommand(self))

    def answer_now(self) -> None:
        """Closes an open thought with the next token."""
        self._answers_now = True
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
        self._waiting = 0
        """The number of waiters."""
        self._urgent = False
        self._last_flush = 0.0

    def put(self, generation: LocalGeneration, output: OutputOrError) -> None:
        waiter = generation.push(output)
        if waiter is not None:
            self._waiters.setdefault(generation.loop, []).append(waiter)
            self._waiting += 1
        is_step = isinstance(output, Step | PendingStep)
        if is_step:
            generation.token_count += 1
        if not is_step or generation.token_count <= EAGER_TOKENS:
            self._urgent = True

    def flush_if_due(self) -> None:
        """Called after each step. Waits a few milliseconds if there are only tokens to deliver."""
        interval = max(MIN_WAKE_INTERVAL_S, min(MAX_WAKE_INTERVAL_S, self._waiting * WAKE_INTERVAL_PER_READER_S))
        if self._urgent or time.monotonic() - self._last_flush >= interval:
            self.flush()

    def flush(self) -> None:
        self._urgent = False
        if not self._waiters:
            return
        self._last_flush = time.monotonic()
        waiters, self._waiters, self._waiting = self._waiters, {}, 0
        for loop, pending in waiters.items():
            try:
                loop.call_soon_threadsafe(_wake, pending)
            except RuntimeError:  # the event loop is closed
                continue


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
