"""Replies in the making: each choice of a request, and all of them as one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.errors import ShuttingDown
from palaver.events import (
    AnswerDelta,
    Event,
    Finished,
    ReadEvent,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
    fold,
)
from palaver.generation import Finish, Step
from palaver.messages import Message
from palaver.phases import Entered, Happening, Phase, Said, Stopped, Tracker, Vocabulary
from palaver.server.metrics import Metrics, TokenPace
from palaver.server.openai.request import ChatCall, OutputOptions


class SeamTrimmer:
    """Takes off the beginning of the new events what their client has already."""

    def __init__(self, held: dict[type[ReadEvent], str]) -> None:
        """By kind of event: what the client has beyond what the reader of its tokens tells of them."""
        self._held = held

    def take(self, event: ReadEvent) -> ReadEvent | None:
        """What of the event is new."""
        held = self._held.pop(type(event), "") if self._held else ""
        if not held:
            return event
        match event:
            case ThinkingDelta(text) | AnswerDelta(text):
                fresh = self._fresh(type(event), held, text)
                return replace(event, text=fresh) if fresh else None
            case ToolCallDelta(_, text):
                fresh = self._fresh(type(event), held, text)
                return replace(event, arguments=fresh) if fresh else None
            case _:
                return event

    def _fresh(self, kind: type[ReadEvent], held: str, text: str) -> str:
        if text.startswith(held):
            return text[len(held) :]
        if held.startswith(text):
            self._held[kind] = held[len(text) :]
            return ""
        return text


def seam_trimmer(model: Model, utterance: ReplyStream, sent: Message | None) -> SeamTrimmer | None:
    """`sent` is the begun reply as its client sent it; by its token ids alone, it is what those tell to their end."""
    prompt, request = utterance.prompt, utterance.request
    if not prompt.reply_ids and not prompt.healing:
        return None
    reader = model.format.reader(prompt, request.sampling.stop, request.tools, request.options)
    opened: Sequence[Event] = reader.open()
    told, has = fold(opened).message, fold([*opened, *reader.close()]).message
    if sent is not None and sent.parts:
        has = sent
    return SeamTrimmer({kind: rest for kind, now, then in _texts(has, told) if (rest := _beyond(now, then))})


def _texts(has: Message, told: Message) -> list[tuple[type[ReadEvent], str, str]]:
    return [
        (ThinkingDelta, has.thinking, told.thinking),
        (AnswerDelta, has.text, told.text),
        (ToolCallDelta, _last_arguments(has), _last_arguments(told)),
    ]


def _last_arguments(message: Message) -> str:
    return message.tool_calls[-1].arguments if message.tool_calls else ""


def _beyond(now: str, then: str) -> str:
    return now[len(then) :] if now.startswith(then) else ""


class AnswerLogprobs:
    """Follows a reply beside its reader: only tokens whose text is answer count, no thought and no marker."""

    def __init__(self, utterance: ReplyStream, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._states = utterance.prompt.phases.states
        self._tracker = Tracker(utterance.prompt.phases, vocabulary, utterance.request.sampling.stop)
        self._count = utterance.request.sampling.logprobs
        self._pending: deque[tuple[Step | None, int]] = deque()
        """Tokens whose bytes are not all accounted for, and how many are left of each."""
        self._answers = False
        for token_id in utterance.prompt.reply_ids:
            self._feed(None, token_id)

    def take(self, steps: Sequence[Step], is_last: bool) -> tuple[dict[str, Any], ...]:
        found = [step for one in steps for step in self._feed(one, one.token_id)]
        if is_last:
            found += self._account(self._tracker.flush())
        return tuple(self._entry(step) for step in found)

    def _feed(self, step: Step | None, token_id: int) -> list[Step]:
        self._pending.append((step, len(self._bytes(token_id))))
        found = self._account(self._tracker.feed(token_id))
        while self._pending and self._pending[0][1] == 0:  # a token of no text
            self._pending.popleft()
        return found

    def _account(self, happenings: Sequence[Happening]) -> list[Step]:
        found: list[Step] = []
        for happening in happenings:
            match happening:
                case Said(state, data):
                    answer = self._states[state].phase is Phase.ANSWER
                    counts = answer and (self._answers or bool(data.strip()))
                    self._answers = self._answers or counts
                    found += self._spend(len(data), counts)
                case Entered(_, marker):
                    self._spend(len(marker), False)
                case Stopped():
                    self._pending.clear()
        return found

    def _spend(self, size: int, counts: bool) -> list[Step]:
        """The tokens that these bytes are of; one that gave some to the answer counts once."""
        found: list[Step] = []
        while size > 0 and self._pending:
            step, left = self._pending.popleft()
            if counts and step is not None:
                found.append(step)
                step = None
            if left > size:
                self._pending.appendleft((step, left - size))
            size -= left
        return found

    def _bytes(self, token_id: int) -> bytes:
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""

    def _entry(self, step: Step) -> dict[str, Any]:
        likeliest = [self._one(one.token_id, one.logprob) for one in step.alternatives[: self._count]]
        return {**self._one(step.token_id, step.logprob), "top_logprobs": likeliest}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        shown = max(logprob, -9999.0)
        return {"token": data.decode("utf-8", "replace"), "logprob": shown, "bytes": list(data)}


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Something of one choice: events, or its end, and what belongs to them."""

    index: int
    events: tuple[ReadEvent, ...] = ()
    finished: Finished | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    sound: str = ""
    """What was said since, of a reply that is spoken: base64."""


@dataclass(slots=True)
class ChoiceUsage:
    """Of one choice, without what it went on from."""

    prompt: int = 0
    cached: int = 0
    reply: int = 0
    thinking: int = 0


@dataclass
class ChoiceStream:
    """One reply. What it had said before this request is not told again."""

    index: int
    model: Model
    utterance: ReplyStream
    shown: OutputOptions
    metrics: Metrics
    sent: Message | None = None
    """What its client sent of a reply that goes on."""
    totals: ChoiceUsage = field(default_factory=ChoiceUsage)
    calls: int = 0
    finish: Finished | None = None

    def __post_init__(self) -> None:
        self._seam = seam_trimmer(self.model, self.utterance, self.sent)
        self._answers = AnswerLogprobs(self.utterance, self.model.vocabulary) if self.shown.logprobs else None
        self._pace = TokenPace(self.metrics)
        self._told = 0
        """Tokens whose ids and log-probabilities were told."""
        self._thought = 0
        """Tokens of thought that the reply had before."""

    @property
    def opens_thinking(self) -> bool:
        """Whether a thought is open before the first token, and is shown as one."""
        split = self.shown.thinking and not self.utterance.request.options.unsplit
        return split and not self.utterance.steps and self.utterance.phase is Phase.THINKING

    async def tell(self) -> AsyncGenerator[ChoiceDelta]:
        try:
            async with self.utterance:
                async for events in self.utterance.batches():
                    if (told := self._take(events)) is not None:
                        yield told
        finally:
            self._pace.no_longer_waits()
            self._count()

    def _take(self, events: Sequence[Event]) -> ChoiceDelta | None:
        match events[0]:
            case Waiting():
                self._pace.waits()
                return ChoiceDelta(self.index)
            case Started(prompt_tokens, cached_tokens):
                self._pace.no_longer_waits()
                self._thought = self.utterance.usage.thinking_tokens
                self.totals.prompt, self.totals.cached = prompt_tokens, cached_tokens
                return ChoiceDelta(self.index)
            case Finished() as finished:
                self.finish = finished
                return self._new(_told_at_end(finished))
            case _ if self.utterance.steps:
                return self._new(cast("Sequence[ReadEvent]", events))
            case _:  # what it had said before
                self.calls = _opened(events)
                return None

    def _new(self, events: Sequence[ReadEvent]) -> ChoiceDelta:
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
        return ChoiceDelta(self.index, read, self.finish, ids, said)

    def count(self) -> ChoiceUsage:
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


class CompletionStream:
    """All choices of one request. Its owner reads `tell` once and closes it."""

    def __init__(self, asked: ChatCall, utterances: Sequence[ReplyStream], metrics: Metrics) -> None:
        self.asked = asked
        self.choices = [
            ChoiceStream(place, asked.model, utterance, asked.shown, metrics, asked.begun)
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

    async def tell(self) -> AsyncGenerator[ChoiceDelta]:
        stream = self.choices[0].tell() if len(self.choices) == 1 else _merged(self.choices)
        async with aclosing(stream):
            async for told in stream:
                if self._ends and told.finished is not None and told.finished.finish is Finish.STOPPED:
                    raise ShuttingDown
                self._running -= told.finished is not None
                yield told


_Arrivals = asyncio.Queue[ChoiceDelta | BaseException | None]


async def _merged(choices: Sequence[ChoiceStream]) -> AsyncGenerator[ChoiceDelta]:
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


async def _forward(choice: ChoiceStream, arrivals: _Arrivals) -> None:
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


def _of(seam: SeamTrimmer | None, events: Sequence[ReadEvent]) -> tuple[ReadEvent, ...]:
    if seam is None:
        return tuple(events)
    return tuple(new for event in events if (new := seam.take(event)) is not None)
