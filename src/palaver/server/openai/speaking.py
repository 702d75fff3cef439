"""Replies in the making: each choice of a request, and all of them as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.events import Event, Finished, ReadEvent, Started, ThinkingDelta, ToolCallOpened, Waiting
from palaver.generation import Finish
from palaver.messages import Message
from palaver.phases import Phase
from palaver.server.errors import ShuttingDown
from palaver.server.metrics import Metrics, Pace
from palaver.server.openai.asking import Asked, Shown
from palaver.server.openai.logprobs import AnswerLogprobs
from palaver.server.openai.seam import Seam, seam


@dataclass(frozen=True, slots=True)
class Told:
    """Something of one choice: events, or its end, and what belongs to them."""

    index: int
    events: tuple[ReadEvent, ...] = ()
    finished: Finished | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    sound: str = ""
    """What was said since, of a reply that is spoken: base64."""


@dataclass(slots=True)
class Totals:
    """Of one choice, without what it went on from."""

    prompt: int = 0
    cached: int = 0
    reply: int = 0
    thinking: int = 0


@dataclass
class Choice:
    """One reply. What it had said before this request is not told again."""

    index: int
    model: Model
    utterance: ReplyStream
    shown: Shown
    metrics: Metrics
    sent: Message | None = None
    """What its client sent of a reply that goes on."""
    totals: Totals = field(default_factory=Totals)
    calls: int = 0
    finish: Finished | None = None

    def __post_init__(self) -> None:
        self._seam = seam(self.model, self.utterance, self.sent)
        self._answers = AnswerLogprobs(self.utterance, self.model.vocabulary) if self.shown.logprobs else None
        self._pace = Pace(self.metrics)
        self._told = 0
        """Tokens whose ids and log-probabilities were told."""
        self._thought = 0
        """Tokens of thought that the reply had before."""

    @property
    def opens_thinking(self) -> bool:
        """Whether a thought is open before the first token, and is shown as one."""
        split = self.shown.thinking and not self.utterance.request.options.unsplit
        return split and not self.utterance.steps and self.utterance.phase is Phase.THINKING

    async def tell(self) -> AsyncGenerator[Told]:
        try:
            async with self.utterance:
                async for events in self.utterance.batches():
                    if (told := self._take(events)) is not None:
                        yield told
        finally:
            self._pace.no_longer_waits()
            self._count()

    def _take(self, events: Sequence[Event]) -> Told | None:
        match events[0]:
            case Waiting():
                self._pace.waits()
                return Told(self.index)
            case Started(prompt_tokens, cached_tokens):
                self._pace.no_longer_waits()
                self._thought = self.utterance.usage.thinking_tokens
                self.totals.prompt, self.totals.cached = prompt_tokens, cached_tokens
                return Told(self.index)
            case Finished() as finished:
                self.finish = finished
                return self._new(_told_at_end(finished))
            case _ if self.utterance.steps:
                return self._new(cast("Sequence[ReadEvent]", events))
            case _:  # what it had said before
                self.calls = _opened(events)
                return None

    def _new(self, events: Sequence[ReadEvent]) -> Told:
        """What came with the last tokens, told with their ids."""
        read = _of(self._seam, events)
        steps = self.utterance.steps
        fresh = steps[self._told :]
        if fresh:
            self._pace.tokens(len(fresh))
        self.calls += _opened(read)
        self._told = len(steps)
        ids = tuple(step.token_id for step in fresh) if self.shown.token_ids else ()
        said = self._answers.take(fresh, self.finish is not None) if self._answers else ()
        return Told(self.index, read, self.finish, ids, said)

    def count(self) -> Totals:
        """Brings the totals up to the tokens so far."""
        self.totals.reply = len(self.utterance.steps)
        self.totals.thinking = self.utterance.usage.thinking_tokens - self._thought
        self.totals.prompt = self.totals.prompt or len(self.utterance.prompt)
        return self.totals

    def _count(self) -> None:
        metrics, totals = self.metrics, self.count()
        metrics.prompt_tokens += totals.prompt
        metrics.cached_tokens += totals.cached
        metrics.reply_tokens += totals.reply
        metrics.thinking_tokens += totals.thinking
        metrics.finished(self.finish.finish.value if self.finish else "left")


class Speaking:
    """All choices of one request. Its owner reads `tell` once and closes it."""

    def __init__(self, asked: Asked, utterances: Sequence[ReplyStream], metrics: Metrics) -> None:
        self.asked = asked
        self.choices = [
            Choice(place, asked.model, utterance, asked.shown, metrics, asked.begun)
            for place, utterance in enumerate(utterances)
        ]
        self._ends = False
        self._running = len(self.choices)

    def stop(self) -> None:
        """The server ends: what runs is cut, and its client told why."""
        self._ends = True
        for choice in self.choices:
            choice.utterance.stop()

    @property
    def finished(self) -> bool:
        """Whether the end of every choice was told."""
        return not self._running

    def usage(self) -> dict[str, Any]:
        """So far, in OpenAI's words. The prompt counts once, replies all."""
        totals = [choice.count() for choice in self.choices]
        prompt, reply = totals[0].prompt, sum(one.reply for one in totals)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": reply,
            "total_tokens": prompt + reply,
            "prompt_tokens_details": {"cached_tokens": totals[0].cached},
            "completion_tokens_details": {"reasoning_tokens": sum(one.thinking for one in totals)},
        }

    async def tell(self) -> AsyncGenerator[Told]:
        stream = self.choices[0].tell() if len(self.choices) == 1 else _merged(self.choices)
        async with aclosing(stream):
            async for told in stream:
                if self._ends and told.finished is not None and told.finished.finish is Finish.STOPPED:
                    raise ShuttingDown
                self._running -= told.finished is not None
                yield told


_Arrivals = asyncio.Queue[Told | BaseException | None]


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[Told]:
    arrivals: _Arrivals = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(choice, arrivals)) for choice in choices]
    left = len(tasks)
    try:
        while left:
            arrival = await arrivals.get()
            if arrival is None:
                left -= 1
            elif isinstance(arrival, BaseException):
                raise arrival
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(choice: Choice, arrivals: _Arrivals) -> None:
    """Puts the choice's items into the queue, then None, or the error that ended it, whatever its type."""
    try:
        async with aclosing(choice.tell()) as stream:
            async for told in stream:
                arrivals.put_nowait(told)
    except BaseException as error:
        arrivals.put_nowait(error)
        raise
    arrivals.put_nowait(None)


def _told_at_end(finished: Finished) -> tuple[ReadEvent, ...]:
    """White space at the end of a thought is the thought's only if more of it follows: a cut one may go on."""
    if finished.finish not in (Finish.LENGTH, Finish.STOPPED):
        return finished.tail
    return tuple(e for e in finished.tail if not (isinstance(e, ThinkingDelta) and not e.text.strip()))


def _opened(events: Sequence[Event]) -> int:
    """How many calls were begun."""
    count = 0
    for event in events:  # for every token, so as cheap as it can be
        if type(event) is ToolCallOpened:
            count += 1
    return count


def _of(seam: Seam | None, events: Sequence[ReadEvent]) -> tuple[ReadEvent, ...]:
    if seam is None:
        return tuple(events)
    return tuple(new for event in events if (new := seam.take(event)) is not None)
