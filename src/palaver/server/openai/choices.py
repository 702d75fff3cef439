"""The choices of one completion: each reply stream as deltas, and all of them as one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
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
from palaver.phases import Phase, StateEntered, StateText, StopMatched, Tracker, TrackerEvent, Vocabulary
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics, TokenPace
from palaver.server.openai.reply_index import ReplyIndex
from palaver.server.openai.request import ChatCall, OutputOptions


class SeamTrimmer:
    """Removes from the first new events the text that the client already has of a continued reply."""

    def __init__(self, sent: dict[type[ReadEvent], str]) -> None:
        """`sent` maps an event type to the client's text beyond what the reader produces from the prefilled tokens."""
        self._sent = sent

    def trim(self, event: ReadEvent) -> ReadEvent | None:
        """Returns the new part of the event, or None if all of it was sent before."""
        sent = self._sent.pop(type(event), "") if self._sent else ""
        if not sent:
            return event
        match event:
            case ThinkingDelta(text) | AnswerDelta(text):
                fresh = self._trim_text(type(event), sent, text)
                return replace(event, text=fresh) if fresh else None
            case ToolCallDelta(_, text):
                fresh = self._trim_text(type(event), sent, text)
                return replace(event, arguments=fresh) if fresh else None
            case _:
                return event

    def _trim_text(self, kind: type[ReadEvent], sent: str, text: str) -> str:
        if text.startswith(sent):
            return text[len(sent) :]
        if sent.startswith(text):
            self._sent[kind] = sent[len(text) :]
            return ""
        return text


def seam_trimmer(model: Model, reply_stream: ReplyStream, partial: Message | None) -> SeamTrimmer | None:
    """`partial` is the reply to continue as the client sent it. If it came as token ids alone, that is their text."""
    prompt, request = reply_stream.prompt, reply_stream.request
    if not prompt.reply_ids and not prompt.healing:
        return None
    reader = model.format.reader(prompt, request.sampling.stop, request.tools, request.options)
    opened: Sequence[Event] = reader.open()
    read, sent = fold(opened).message, fold([*opened, *reader.close()]).message
    if partial is not None and partial.parts:
        sent = partial
    return SeamTrimmer({kind: rest for kind, a, b in _text_pairs(sent, read) if (rest := _remainder(a, b))})


def _text_pairs(sent: Message, read: Message) -> list[tuple[type[ReadEvent], str, str]]:
    return [
        (ThinkingDelta, sent.thinking, read.thinking),
        (AnswerDelta, sent.text, read.text),
        (ToolCallDelta, _last_arguments(sent), _last_arguments(read)),
    ]


def _last_arguments(message: Message) -> str:
    return message.tool_calls[-1].arguments if message.tool_calls else ""


def _remainder(text: str, prefix: str) -> str:
    return text[len(prefix) :] if text.startswith(prefix) else ""


class AnswerLogprobs:
    """Log-probabilities of the tokens whose text belongs to the answer: no thinking and no markers.

    Tracks the phases of the reply in parallel to its reader.
    """

    def __init__(self, reply_stream: ReplyStream, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._states = reply_stream.prompt.phases.states
        self._tracker = Tracker(reply_stream.prompt.phases, vocabulary, reply_stream.request.sampling.stop)
        self._count = reply_stream.request.sampling.logprobs
        self._pending: deque[tuple[Step | None, int]] = deque()
        """Tokens with bytes that are not assigned to a phase yet, and how many."""
        self._in_answer = False
        for token_id in reply_stream.prompt.reply_ids:
            self._feed(None, token_id)

    def feed(self, steps: Sequence[Step], is_last: bool) -> tuple[dict[str, Any], ...]:
        """The entries of the tokens that are known to be answer now."""
        answer = [step for one in steps for step in self._feed(one, one.token_id)]
        if is_last:
            answer += self._assign(self._tracker.flush())
        return tuple(self._entry(step) for step in answer)

    def _feed(self, step: Step | None, token_id: int) -> list[Step]:
        self._pending.append((step, len(self._bytes(token_id))))
        found = self._assign(self._tracker.feed(token_id))
        while self._pending and self._pending[0][1] == 0:  # a token of no text
            self._pending.popleft()
        return found

    def _assign(self, happenings: Sequence[TrackerEvent]) -> list[Step]:
        found: list[Step] = []
        for happening in happenings:
            match happening:
                case StateText(state, data):
                    answer = self._states[state].phase is Phase.ANSWER
                    counts = answer and (self._in_answer or bool(data.strip()))
                    self._in_answer = self._in_answer or counts
                    found += self._consume(len(data), counts)
                case StateEntered(_, marker):
                    self._consume(len(marker), False)
                case StopMatched():
                    self._pending.clear()
        return found

    def _consume(self, size: int, counts: bool) -> list[Step]:
        """Returns the tokens of the next `size` bytes; a token that is partly answer is returned once."""
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
        top = [self._token(one.token_id, one.logprob) for one in step.alternatives[: self._count]]
        return {**self._token(step.token_id, step.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The next events of one choice, or its end, with their token ids and log-probabilities."""

    index: int
    events: tuple[ReadEvent, ...] = ()
    finished: Finished | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    audio: str = ""
    """Base64. The audio since the last delta of a spoken reply."""


@dataclass(slots=True)
class ChoiceUsage:
    """Token counts of one choice, without the reply tokens it continues."""

    prompt: int = 0
    cached: int = 0
    reply: int = 0
    thinking: int = 0


@dataclass
class ChoiceStream:
    """One choice: reads the batches of its reply stream as deltas. Leaving it closes the reply stream.

    What the reply contained before this request is not repeated.
    """

    index: int
    model: Model
    reply_stream: ReplyStream
    output: OutputOptions
    metrics: Metrics
    partial: Message | None = None
    """The reply to continue, as the client sent it."""
    usage: ChoiceUsage = field(default_factory=ChoiceUsage)
    tool_calls: int = 0
    finished: Finished | None = None

    def __post_init__(self) -> None:
        self._seam = seam_trimmer(self.model, self.reply_stream, self.partial)
        self._logprobs = AnswerLogprobs(self.reply_stream, self.model.vocabulary) if self.output.logprobs else None
        self._pace = TokenPace(self.metrics)
        self._emitted = 0
        """Tokens whose ids and log-probabilities were emitted."""
        self._earlier_thinking = 0
        """Thinking tokens that the reply had before this request."""

    async def __aenter__(self) -> ChoiceStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.reply_stream.__aexit__(*error)
        finally:
            self._pace.stop_waiting()
            self._record_metrics()

    @property
    def opens_thinking(self) -> bool:
        """Whether the prompt has opened a thought, and it is shown as one."""
        split = self.output.thinking and not self.reply_stream.request.options.unsplit
        return split and not self.reply_stream.steps and self.reply_stream.phase is Phase.THINKING

    def read(self, events: Sequence[Event]) -> ChoiceDelta | None:
        """The delta of one batch of events."""
        match events[0]:
            case Waiting():
                self._pace.start_waiting()
                return ChoiceDelta(self.index)
            case Started(prompt_tokens, cached_tokens):
                self._pace.stop_waiting()
                self._earlier_thinking = self.reply_stream.usage.thinking_tokens
                self.usage.prompt, self.usage.cached = prompt_tokens, cached_tokens
                return ChoiceDelta(self.index)
            case Finished() as finished:
                self.finished = finished
                return self._delta(_final_events(finished))
            case _ if self.reply_stream.steps:
                return self._delta(cast("Sequence[ReadEvent]", events))
            case _:  # the part of the reply that is continued
                self.tool_calls = _count_tool_calls(events)
                return None

    def _delta(self, events: Sequence[ReadEvent]) -> ChoiceDelta:
        """The events of the last tokens, with their ids."""
        read = _trim(self._seam, events)
        steps = self.reply_stream.steps
        new = steps[self._emitted :]
        if new:
            self._pace.observe(len(new))
        self.tool_calls += _count_tool_calls(read)
        self._emitted = len(steps)
        ids = tuple(step.token_id for step in new) if self.output.token_ids else ()
        logprobs = self._logprobs.feed(new, self.finished is not None) if self._logprobs else ()
        return ChoiceDelta(self.index, read, self.finished, ids, logprobs)

    def update_usage(self) -> ChoiceUsage:
        """Brings the usage up to the tokens so far."""
        self.usage.reply = len(self.reply_stream.steps)
        self.usage.thinking = self.reply_stream.usage.thinking_tokens - self._earlier_thinking
        self.usage.prompt = self.usage.prompt or len(self.reply_stream.prompt)
        return self.usage

    def _record_metrics(self) -> None:
        metrics, usage = self.metrics, self.update_usage()
        metrics.prompt_tokens += usage.prompt
        metrics.cached_tokens += usage.cached
        metrics.reply_tokens += usage.reply
        metrics.thinking_tokens += usage.thinking
        metrics.count_finish(self.finished.finish.value if self.finished else "left")


_Arrivals = asyncio.Queue[ChoiceDelta | BaseException | None]


class CompletionStream:
    """All choices of one request. Its owner reads `deltas` once and closes it."""

    def __init__(
        self,
        call: ChatCall,
        reply_streams: Sequence[ReplyStream],
        metrics: Metrics,
        limiter: ConcurrencyLimiter | None = None,
        reply_index: ReplyIndex | None = None,
    ) -> None:
        """The stream holds its places in `limiter` while it is read, and adds finished replies to `reply_index`."""
        self.call = call
        self.choices = [
            ChoiceStream(index, call.model, reply_stream, call.output, metrics, call.partial)
            for index, reply_stream in enumerate(reply_streams)
        ]
        self._limiter = limiter
        self._reply_index = reply_index
        self._shutting_down = False
        self._running = len(self.choices)

    def stop(self) -> None:
        """Stops the replies because the server shuts down: `deltas` then raises ShuttingDown."""
        self._shutting_down = True
        for choice in self.choices:
            choice.reply_stream.stop()

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._running

    def usage(self) -> dict[str, Any]:
        """The usage so far, in OpenAI's format. The prompt counts once, replies all."""
        usages = [choice.update_usage() for choice in self.choices]
        prompt, reply = usages[0].prompt, sum(usage.reply for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": reply,
            "total_tokens": prompt + reply,
            "prompt_tokens_details": {"cached_tokens": usages[0].cached},
            "completion_tokens_details": {"reasoning_tokens": sum(usage.thinking for usage in usages)},
        }

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
        """Raises QueueFull where the limiter has no place left. Closing it closes the reply streams."""
        with self._acquire_places():
            if len(self.choices) == 1:
                async with self.choices[0] as choice:
                    async for events in choice.reply_stream.batches():
                        if (delta := choice.read(events)) is not None:
                            yield self._checked(delta)
                return
            async with _merged(self.choices) as arrivals:
                running = len(self.choices)
                while running:
                    arrival = await arrivals.get()
                    if arrival is None:
                        running -= 1
                    elif isinstance(arrival, BaseException):
                        raise arrival
                    else:
                        yield self._checked(arrival)

    def _acquire_places(self) -> AbstractContextManager[None]:
        if self._limiter is None:
            return nullcontext()
        return self._limiter.acquire(self.call.request.owner, self.stop, len(self.choices))

    def _checked(self, delta: ChoiceDelta) -> ChoiceDelta:
        if delta.finished is None:
            return delta
        if self._shutting_down and delta.finished.finish is Finish.STOPPED:
            raise ShuttingDown
        self._running -= 1
        if self._reply_index is not None:
            request, reply = self.call.request, self.choices[delta.index].reply_stream.reply()
            self._reply_index.add(request.owner, request.messages, reply.message, reply.token_ids)
        return delta


@asynccontextmanager
async def _merged(choices: Sequence[ChoiceStream]) -> AsyncIterator[_Arrivals]:
    """A queue of the deltas of all choices; None stands for the end of one."""
    arrivals: _Arrivals = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(choice, arrivals)) for choice in choices]
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(choice: ChoiceStream, arrivals: _Arrivals) -> None:
    """Puts the choice's deltas into the queue, then None, or the error that ended it, whatever its type."""
    try:
        async with choice:
            async for events in choice.reply_stream.batches():
                if (delta := choice.read(events)) is not None:
                    arrivals.put_nowait(delta)
    except BaseException as error:
        arrivals.put_nowait(error)
        raise
    arrivals.put_nowait(None)


def _final_events(finished: Finished) -> tuple[ReadEvent, ...]:
    """The events of the end, without trailing white space of a thought that was cut: the thought may be continued."""
    if finished.finish not in (Finish.LENGTH, Finish.STOPPED):
        return finished.tail
    return tuple(e for e in finished.tail if not (isinstance(e, ThinkingDelta) and not e.text.strip()))


def _count_tool_calls(events: Sequence[Event]) -> int:
    count = 0
    for event in events:  # runs for every token: a plain loop is the fastest
        if type(event) is ToolCallOpened:
            count += 1
    return count


def _trim(seam: SeamTrimmer | None, events: Sequence[ReadEvent]) -> tuple[ReadEvent, ...]:
    if seam is None:
        return tuple(events)
    return tuple(new for event in events if (new := seam.trim(event)) is not None)
