"""The choices of one completion: each reply stream as deltas, and all of them as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyStream
from palaver.errors import ShuttingDown
from palaver.events import (
    AnswerDelta,
    Event,
    Failed,
    Finished,
    ReadEvent,
    ReplyBatch,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Usage,
    Waiting,
    fold,
)
from palaver.generation import Finish, Step
from palaver.messages import Message
from palaver.phases import Phase, Vocabulary
from palaver.server.limits import ConcurrencyLimiter
from palaver.server.metrics import Metrics, TokenPace
from palaver.server.openai.request import ChatCall, OutputOptions
from palaver.server.state import ReplyIndex
from palaver.store import Conflict

MIN_LOGPROB = -9999.0


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


def seam_trimmer(reply_stream: ReplyStream, partial: Message | None) -> SeamTrimmer | None:
    """`partial` is the reply to continue as the client sent it. If it came as token ids alone, that is their text."""
    prompt, opening = reply_stream.prompt, reply_stream.opening
    if not prompt.reply_ids and not prompt.healing:
        return None
    read, sent = fold(opening.events).message, partial
    if sent is None or not sent.parts:
        sent = fold([*opening.events, *opening.tail]).message
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


def logprob_entries(steps: Iterable[Step], vocabulary: Vocabulary, top: int) -> tuple[dict[str, Any], ...]:
    """The log-probabilities of the tokens in OpenAI's format, each with `top` alternatives."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = vocabulary[token_id] if token_id < len(vocabulary) else b""
        known = logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # it is not a number for tokens that were not sampled
        return {"token": data.decode("utf-8", "replace"), "logprob": known, "bytes": list(data)}

    return tuple(
        {
            **token(step.token_id, step.logprob),
            "top_logprobs": [token(one.token_id, one.logprob) for one in step.alternatives[:top]],
        }
        for step in steps
    )


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
    tool_calls: int = 0
    finished: Finished | None = None

    def __post_init__(self) -> None:
        self._seam = seam_trimmer(self.reply_stream, self.partial)
        self._pace = TokenPace(self.metrics)
        self.tool_calls = _count_tool_calls(self.reply_stream.opening.events)

    async def __aenter__(self) -> ChoiceStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.reply_stream.__aexit__(*error)
        finally:
            self._pace.stop_waiting()
            self.metrics.count_reply(self.usage, self.finished.finish.value if self.finished else "left")

    @property
    def usage(self) -> Usage:
        """The tokens so far, without the reply tokens that it continues."""
        stream = self.reply_stream
        thinking = stream.thinking_tokens - stream.opening.thinking_tokens
        return Usage(stream.started.prompt_tokens, stream.started.cached_tokens, len(stream.steps), thinking)

    @property
    def opens_thinking(self) -> bool:
        """Whether the prompt has opened a thought, and it is shown as one."""
        split = self.output.thinking and not self.reply_stream.request.options.unsplit
        return split and self.reply_stream.opening.phase is Phase.THINKING

    def read(self, batch: ReplyBatch) -> ChoiceDelta | None:
        """The delta of one batch. Raises the error of a stored turn that failed."""
        match batch.events[0]:
            case Waiting():
                self._pace.start_waiting()
                return ChoiceDelta(self.index)
            case Started():
                self._pace.stop_waiting()
                return ChoiceDelta(self.index)
            case Finished() as finished:
                self.finished = finished
                return self._delta(batch, _final_events(finished))
            case Failed() as failed:
                raise self.reply_stream.failure(failed)
            case Snapshot():
                raise Conflict("The reply's tokens are not known to this model.")
            case _ if batch.steps:
                return self._delta(batch, cast("Sequence[ReadEvent]", batch.events))
            case _:  # the part of the reply that is continued
                return None

    def _delta(self, batch: ReplyBatch, events: Sequence[ReadEvent]) -> ChoiceDelta:
        read = _trim(self._seam, events)
        if batch.steps:
            self._pace.observe(len(batch.steps))
        self.tool_calls += _count_tool_calls(read)
        ids = tuple(step.token_id for step in batch.steps) if self.output.token_ids else ()
        logprobs: tuple[dict[str, Any], ...] = ()
        if self.output.logprobs:
            logprobs = logprob_entries(batch.answer_steps, self.model.vocabulary, self.output.top_logprobs)
        return ChoiceDelta(self.index, read, self.finished, ids, logprobs)


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
        usages = [choice.usage for choice in self.choices]
        prompt, reply = usages[0].prompt_tokens, sum(usage.reply_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": reply,
            "total_tokens": prompt + reply,
            "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(usage.thinking_tokens for usage in usages)},
        }

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
        """Raises QueueFull where the limiter has no place left. Closing it closes the reply streams."""
        with self._acquire_places():
            if len(self.choices) == 1:
                async with self.choices[0] as choice:
                    async for batch in choice.reply_stream.batches():
                        if (delta := choice.read(batch)) is not None:
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
            async for batch in choice.reply_stream.batches():
                if (delta := choice.read(batch)) is not None:
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
