"""An engine that says what it is told to: deterministic, for tests of everything above engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from palaver.engines.base import EngineInfo
from palaver.engines.reply import Reply
from palaver.errors import ContextOverflow, EngineClosed, EngineError, PalaverError
from palaver.generation import Ended, Finish, Output, Prefilled, Prompt, Queued, Step
from palaver.phases import Vocabulary
from palaver.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Hold:
    """Says nothing more until the event is set."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class Fail:
    error: PalaverError = field(default_factory=lambda: EngineError("The script says to fail here."))


Script = Sequence[int | Step | Queued | Hold | Fail]
"""What one reply is: tokens, and what happens between them."""


@dataclass(frozen=True, slots=True)
class Call:
    prompt: Prompt
    sampling: Sampling
    choice: int


class ScriptedEngine:
    """Replies with its scripts in turn. A prompt that continues a reply gets the rest of that reply's script."""

    def __init__(
        self,
        scripts: Sequence[Script],
        vocabulary: Vocabulary,
        *,
        context_length: int = 4096,
        end_ids: frozenset[int] = frozenset(),
        defaults: Sampling | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.cancelled = 0
        self._scripts = list(scripts)
        self._next = 0
        self._closed = False
        self._vocabulary = vocabulary
        self._info = EngineInfo(
            model="scripted",
            context_length=context_length,
            vocabulary_size=len(vocabulary),
            end_ids=end_ids,
            defaults=defaults or Sampling(),
            device="none",
            dtype="none",
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @asynccontextmanager
    async def generate(
        self, prompt: Prompt, sampling: Sampling, choice: int = 0
    ) -> AsyncIterator[AsyncIterator[Output]]:
        if self._closed:
            raise EngineClosed
        if len(prompt) > self._info.context_length:
            raise ContextOverflow(len(prompt), self._info.context_length)
        self.calls.append(Call(prompt, sampling, choice))
        steps = self._say(prompt, sampling)
        try:
            yield steps
        finally:
            await steps.aclose()

    async def close(self) -> None:
        self._closed = True

    async def _say(self, prompt: Prompt, sampling: Sampling) -> AsyncGenerator[Output, None]:
        reply = Reply(prompt, sampling, self._vocabulary, self._info.end_ids, self._info.context_length)
        finished = False
        try:
            async for output in self._outputs(prompt, reply):
                finished = isinstance(output, Ended)
                yield output
        finally:
            self.cancelled += not finished

    async def _outputs(self, prompt: Prompt, reply: Reply) -> AsyncIterator[Output]:
        if reply.ended is not None:
            yield reply.ended
            return
        yield Prefilled(len(prompt), len(prompt.reply_ids))
        for item in _rest(self._script_for(prompt), len(prompt.reply_ids)):
            match item:
                case Hold(event):
                    await event.wait()
                case Fail(error):
                    raise error
                case Queued():
                    yield item
                case _:
                    async for output in _take(reply, item):
                        yield output
            if self._closed:
                raise EngineClosed
            if reply.ended is not None:
                yield reply.ended
                return
        yield Ended(Finish.END)

    def _script_for(self, prompt: Prompt) -> Script:
        said = list(prompt.reply_ids)
        if said:
            matching = [script for script in self._scripts if _tokens(script)[: len(said)] == said]
            return matching[-1] if matching else self._scripts[max(0, self._next - 1) % len(self._scripts)]
        script = self._scripts[self._next % len(self._scripts)]
        self._next += 1
        return script


async def _take(reply: Reply, item: int | Step) -> AsyncIterator[Output]:
    """The token, after those that are forced before it."""
    while reply.forced is not None and reply.ended is None:
        forced = reply.forced
        reply.take(forced)
        yield Step(forced, 0.0)
    if reply.ended is None:
        step = item if isinstance(item, Step) else Step(item, 0.0)
        reply.take(step.token_id)
        yield step


def _tokens(script: Script) -> list[int]:
    return [item.token_id if isinstance(item, Step) else item for item in script if isinstance(item, int | Step)]


def _rest(script: Script, said: int) -> Script:
    """The script from the token on that comes after the first `said` ones."""
    for index, item in enumerate(script):
        if said == 0:
            return script[index:]
        said -= isinstance(item, int | Step)
    return ()
