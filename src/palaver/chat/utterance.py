"""One turn: render, generate, read, record.

A turn is an async stream of events with one owner. Not streaming is folding it. Stopping keeps the tokens;
continuing hands them back, so that the reply goes on as if it had never been stopped.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from palaver.engines.base import Engine, Generation
from palaver.errors import ContextOverflow, NothingToContinue
from palaver.events import Event, Finished, Folded, Started, Usage, fold
from palaver.formats.base import Format
from palaver.formats.options import Options
from palaver.formats.reader import Reader
from palaver.generation import Ended, Finish, Prefilled, Prompt, Queued, Step
from palaver.messages import Message, Tool
from palaver.phases import Phase
from palaver.sampling import MAX_SEED, Sampling, checked


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides a reply."""

    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[Tool, ...] = ()
    options: Options = field(default_factory=Options)
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The record of one turn: the token ids are what the model said, the message is what it means."""

    request: Request
    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    """The tokens generated in this turn, without those it went on from."""
    folded: Folded

    @property
    def message(self) -> Message:
        return self.folded.message

    @property
    def finish(self) -> Finish | None:
        return self.folded.finished.finish if self.folded.finished else None


def draw_seed() -> int:
    """A seed small enough to be read aloud and typed again."""
    return secrets.randbelow(min(2**32, MAX_SEED))


class Turn:
    """A reply in the making: an async context whose owner iterates over its events once and leaves it."""

    def __init__(self, request: Request, prompt: Prompt, reader: Reader, engine: Engine) -> None:
        self.request = request
        self.prompt = prompt
        self._reader = reader
        self._engine = engine
        self._stopped = False
        self._generation: Generation | None = None
        self._steps: list[Step] = []
        self._told: list[Event] = []
        self._started = Started(len(prompt), 0)
        self._events = self._run()

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._events.aclose()

    async def __aiter__(self) -> AsyncGenerator[Event]:
        async for event in self._events:
            self._told.append(event)
            yield event

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt.reply_ids, *(step.token_id for step in self._steps))

    @property
    def phase(self) -> Phase:
        return self._reader.phase

    def stop(self) -> None:
        """Ends the reply now, in prefill too; what was said stays, and the stream ends with `Finished`."""
        self._stopped = True
        if self._generation is not None:
            self._generation.stop()

    def answer_now(self) -> None:
        """Closes an open thought, so that the answer comes next."""
        if self._generation is not None:
            self._generation.answer_now()

    def reply(self) -> Reply:
        return Reply(self.request, self.token_ids, tuple(self._steps), fold(self._told))

    async def _run(self) -> AsyncGenerator[Event]:
        ended = Ended(Finish.STOPPED)
        async with self._engine.generate(self.prompt, self.request.sampling, self.request.choice) as self._generation:
            if self._stopped:
                self._generation.stop()
            async for output in self._generation:
                if isinstance(output, Ended):
                    ended = output
                    break
                for event in self._read(output):
                    yield event
        for event in self._reader.close():
            yield event
        yield Finished(ended.finish, self._usage(), ended.stop)

    def _read(self, output: Queued | Prefilled | Step) -> list[Event]:
        match output:
            case Queued():
                return []
            case Prefilled(prompt_tokens, cached_tokens):
                self._started = Started(prompt_tokens, cached_tokens)
                return [self._started, *self._reader.open()]
            case Step(token_id):
                self._steps.append(output)
                return [*self._reader.feed(token_id)]
            case _:
                assert_never(output)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt.context_ids),
            cached_tokens=self._started.cached_tokens,
            reply_tokens=len(self.token_ids),
            thinking_tokens=self._reader.thinking_tokens,
        )


class Chat:
    """Turns on one model: its engine and its format."""

    def __init__(self, engine: Engine, format: Format) -> None:
        self.engine = engine
        self.format = format

    def turn(self, request: Request, reply_so_far: Sequence[int] = ()) -> Turn:
        """A turn to enter; with `reply_so_far`, the token ids of a reply that goes on."""
        stops = tuple(dict.fromkeys((*request.sampling.stop, *self.format.stop_strings)))
        request = replace(request, sampling=checked(replace(request.sampling, stop=stops)))
        prompt = self.format.render(request.messages, request.tools, request.options, reply_so_far)
        limit = self.engine.info.context_length
        if len(prompt) >= limit:
            raise ContextOverflow(len(prompt), limit)
        phases = replace(prompt.phases, ends=prompt.phases.ends | self.engine.info.end_ids)
        prompt = replace(prompt, phases=phases)
        return Turn(
            request,
            prompt,
            self.format.reader(prompt, request.sampling.stop, request.tools, request.options),
            self.engine,
        )

    def continued(self, reply: Reply) -> Turn:
        """Goes on with a stopped reply, token for token as if it had not been stopped.

        One that was cut for its length gets the same length again.
        """
        if reply.finish in (Finish.END, Finish.STOP_STRING):
            raise NothingToContinue("The reply is whole: there is nothing to continue.")
        request = reply.request
        if reply.finish is Finish.LENGTH and request.sampling.max_tokens is not None:
            allowance = len(reply.token_ids) + request.sampling.max_tokens
            request = replace(request, sampling=replace(request.sampling, max_tokens=allowance))
        return self.turn(request, reply.token_ids)

    async def reply(self, request: Request, reply_so_far: Sequence[int] = ()) -> Reply:
        """The whole turn at once: the same stream, folded."""
        async with self.turn(request, reply_so_far) as turn:
            async for _ in turn:
                pass
            return turn.reply()
