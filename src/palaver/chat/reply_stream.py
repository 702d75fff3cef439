"""A reply in the making: render, generate, read. Nothing is stored here.

An utterance is an async stream of events with one owner. Not streaming is folding it. Stopping keeps the tokens;
continuing hands them back, so that the reply goes on as if it had never been stopped."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from palaver.engines.base import EngineGeneration
from palaver.events import Event, Finished, Folded, ReadEvent, Started, Usage, Waiting, fold
from palaver.formats.base import RenderOptions
from palaver.formats.reader import ReplyReader
from palaver.generation import AnswerAsked, Ended, Finish, Prefilled, Prompt, Queued, Step
from palaver.messages import Message, Tool
from palaver.phases import Phase
from palaver.sampling import Sampling

Keep = Callable[[Step], Awaitable[Step]]
"""Records a token before anybody hears of it, and gives it as it was recorded."""
KeepAnswerAt = Callable[[int], Awaitable[None]]
"""Records the position at which the answer was asked for, before the tokens that follow from it."""


class TokenSource(Protocol):
    """Where a reply's tokens come from: an engine, or whoever has them from one."""

    def generate(
        self, prompt: Prompt, sampling: Sampling, choice: int = 0
    ) -> AbstractAsyncContextManager[EngineGeneration]: ...


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """Everything that decides a reply."""

    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    options: RenderOptions = field(default_factory=RenderOptions)
    choice: int = 0
    owner: str = ""
    """Whose request it is: what was computed for one user is never reused for another."""
    past: tuple[tuple[int, ...] | None, ...] = ()
    """The token ids of the replies among the messages, in their order, where they are known."""
    conversation: str = ""
    """The id of the conversation it belongs to, where it does."""
    answer_at: int | None = None
    """How many tokens the reply had when somebody asked for the answer, where somebody did."""


@dataclass(frozen=True, slots=True)
class ReplyRecord:
    """The record of one utterance: the token ids are what the model said, the message is what it means."""

    request: ReplyRequest
    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    """The tokens generated just now, without those it went on from."""
    folded: Folded

    @property
    def message(self) -> Message:
        return self.folded.message

    @property
    def finish(self) -> Finish | None:
        return self.folded.finished.finish if self.folded.finished else None


class ReplyStream:
    """An async context whose owner iterates over its events once and leaves it."""

    def __init__(
        self, request: ReplyRequest, prompt: Prompt, reader: ReplyReader, engine: TokenSource, keep: Keep | None = None
    ) -> None:
        self.request = request
        self.prompt = prompt
        self._reader = reader
        self._engine = engine
        self._keep = keep
        self.keep_answer_at: KeepAnswerAt | None = None
        self._stopped = False
        self.answers_now = False
        self._generation: EngineGeneration | None = None
        self.steps: list[Step] = []
        self.notice = ""
        """What the reader should know of how it goes on, in one sentence."""
        self._told: list[Event] = []
        self._started = Started(len(prompt), 0)
        self._batches = self._run()

    async def __aenter__(self) -> ReplyStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._batches.aclose()

    async def __aiter__(self) -> AsyncGenerator[Event]:
        async for events in self.batches():
            for event in events:
                yield event

    async def batches(self) -> AsyncGenerator[Sequence[Event]]:
        """The same events, all that one token made certain together."""
        async for events in self._batches:
            self._told += events
            yield events

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt.reply_ids, *(step.token_id for step in self.steps))

    @property
    def said(self) -> int:
        """How many tokens the reply has."""
        return len(self.prompt.reply_ids) + len(self.steps)

    @property
    def phase(self) -> Phase:
        return self._reader.phase

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt.context_ids),
            cached_tokens=self._started.cached_tokens,
            reply_tokens=self.said,
            thinking_tokens=self._reader.thinking_tokens,
        )

    def stop(self) -> None:
        """Ends the reply now, in prefill too; what was said stays, and the stream ends with `Finished`."""
        self._stopped = True
        if self._generation is not None:
            self._generation.stop()

    def answer_now(self) -> None:
        """Closes an open thought, so that the answer comes next."""
        self.answers_now = True
        if self._generation is not None:
            self._generation.answer_now()

    def reply(self) -> ReplyRecord:
        return ReplyRecord(self.request, self.token_ids, tuple(self.steps), fold(self._told))

    def tail(self) -> tuple[ReadEvent, ...]:
        """What the reader still holds back, now that nothing more comes. To be asked for once."""
        return tuple(self._reader.close())

    async def _run(self) -> AsyncGenerator[Sequence[Event]]:
        ended = Ended(Finish.STOPPED)
        if known := self._reader.open():  # before the engine is asked: how the reply opens, what it has said
            yield known
        asked = self._engine.generate(self.prompt, self.request.sampling, self.request.choice)
        async with asked as self._generation:
            if self._stopped:
                self._generation.stop()
            if self.answers_now:
                self._generation.answer_now()
            async for output in self._generation:
                if isinstance(output, Ended):
                    ended = output
                    break
                if events := await self._read(output):
                    yield events
                if self._reader.whole:
                    ended = Ended(Finish.END)
                    break
        yield [Finished(ended.finish, self.usage, ended.stop, self.tail())]

    async def _read(self, output: Queued | Prefilled | Step | AnswerAsked) -> list[Event]:
        match output:
            case Queued(position, seconds):
                return [Waiting(position, seconds)]
            case Prefilled(prompt_tokens, cached_tokens):
                self._started = Started(prompt_tokens, cached_tokens, self.notice)
                return [self._started]
            case Step():
                step = output if self._keep is None else await self._keep(output)
                self.steps.append(step)
                return [*self._reader.feed(step.token_id)]
            case AnswerAsked(position):
                if self.keep_answer_at is not None:
                    await self.keep_answer_at(position)
                return []
            case _:
                assert_never(output)


class TurnTimer:
    """In seconds, on top of what earlier runs of the same reply took: `seconds` in all, `thinking` without the
    prefill, and `first_token`, which is told of the first run alone."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._before = dict(before or {})
        self._begun = self._last = time.monotonic()
        self._first: float | None = None
        self._thinking = 0.0

    def prefilled(self) -> None:
        self._last = time.monotonic()

    def token(self, thinking: bool) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._begun
        if thinking:
            self._thinking += now - self._last
        self._last = now

    def timings(self) -> dict[str, float]:
        seconds = self._before.get("seconds", 0.0) + time.monotonic() - self._begun
        whole = {**self._before, "seconds": seconds, "thinking": self._before.get("thinking", 0.0) + self._thinking}
        return whole if self._first is None else {"first_token": self._first, **whole}
