"""A deterministic engine that generates scripted tokens, for tests of the layers above engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from palaver.engines.base import Capability, EngineInfo, EngineState, EngineStatus, check_capabilities, check_prompt
from palaver.engines.core.reply_state import ReplyState
from palaver.errors import ContextOverflow, EngineClosed, EngineError, PalaverError
from palaver.generation import (
    AnswerRequested,
    Ended,
    Finish,
    MediaExpansion,
    MediaItem,
    Output,
    Prefilled,
    Prompt,
    Queued,
    Step,
)
from palaver.phases import Vocabulary
from palaver.sampling import Sampling

HAS = (Capability.FILTERS, Capability.EXACT_CONTINUATION)
"""Filters and penalties are accepted: the script stays the same."""
LACKS = tuple(capability for capability in Capability if capability not in HAS)


@dataclass(frozen=True, slots=True)
class HoldScript:
    """Generates nothing until the event is set."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class FailScript:
    error: PalaverError = field(default_factory=lambda: EngineError("The script says to fail here."))


Script = Sequence[int | Step | Queued | HoldScript | FailScript]
"""One reply: tokens, and what happens between them."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    prompt: Prompt
    sampling: Sampling
    choice: int


class ScriptedGeneration:
    """The outputs of one scripted reply."""

    outputs: AsyncGenerator[Output]

    def __init__(self, reply: ReplyState) -> None:
        self._reply = reply
        self._next: Output | None = None
        self._pending_answer: AnswerRequested | None = None
        self.stopped = asyncio.Event()
        self.finished = False

    def __aiter__(self) -> ScriptedGeneration:
        return self

    async def __anext__(self) -> Output:
        if self._next is None:
            self._next = await anext(self.outputs)
        if self._pending_answer is not None:
            answer, self._pending_answer = self._pending_answer, None
            return answer
        output, self._next = self._next, None
        self.finished = isinstance(output, Ended)
        return output

    def stop(self) -> None:
        self.stopped.set()

    def answer_now(self) -> None:
        self._pending_answer = AnswerRequested(self._reply.answer_now())


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class ScriptedEngine:
    """Replies with its scripts in turn. A continued reply gets the rest of its own script."""

    def __init__(
        self,
        scripts: Sequence[Script],
        vocabulary: Vocabulary,
        *,
        context_length: int = 4096,
        end_ids: frozenset[int] = frozenset(),
        defaults: Sampling | None = None,
        fingerprint: str = "scripted",
        strict: bool = False,
    ) -> None:
        """`strict`: requests are checked as by other engines, and what a script can't do is refused. Otherwise a script
        stands for what a model says under all options, to any prompt."""
        self.calls: list[ScriptedCall] = []
        self.cancelled = 0
        self.forgotten: list[str] = []
        self._scripts = list(scripts)
        self._script_ids: list[list[int]] = []
        """The tokens of each script, once a reply was continued."""
        self._next = 0
        self._closed = False
        self._strict = strict
        self._vocabulary = vocabulary
        self._info = EngineInfo(
            model="scripted",
            context_length=context_length,
            vocabulary_size=len(vocabulary),
            end_ids=end_ids,
            defaults=defaults or Sampling(),
            device="none",
            dtype="none",
            fingerprint=fingerprint,
            lacks=dict.fromkeys(LACKS, "a script is the same whatever is asked for") if strict else {},
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        state = EngineState.FAILED if self._closed else EngineState.READY
        return EngineStatus(state, "The engine has been closed." if self._closed else "")

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[ScriptedGeneration]:
        if self._closed:
            raise EngineClosed
        check_capabilities(self._info, prompt, sampling, choice)
        if self._strict:
            check_prompt(self._info, prompt)
        elif len(prompt) > self._info.context_length:
            raise ContextOverflow(len(prompt), self._info.context_length)
        self.calls.append(ScriptedCall(prompt, sampling, choice))
        reply, own_ids = self._restore(prompt, sampling)
        generation = ScriptedGeneration(reply)
        generation.outputs = self._outputs(prompt, reply, own_ids, generation.stopped)
        try:
            yield generation
        finally:
            self.cancelled += not generation.finished
            await generation.outputs.aclose()

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        """Two of the last token of the vocabulary, which is a control token in tests."""
        if item.load is not None:
            item.load()
        return MediaExpansion((len(self._vocabulary) - 1,) * 2)

    async def metrics(self) -> dict[str, float]:
        return {}

    async def forget(self, conversation: str) -> None:
        self.forgotten.append(conversation)

    async def close(self) -> None:
        self._closed = True

    async def _outputs(
        self, prompt: Prompt, reply: ReplyState, own_ids: list[int], stopped: asyncio.Event
    ) -> AsyncGenerator[Output]:
        if reply.ended is not None:
            yield reply.ended
            return
        yield Prefilled(len(prompt), len(prompt.reply_ids))
        script = self.choose_script(prompt, own_ids)
        for item in _remaining(script, len(own_ids)):
            match item:
                case HoldScript(event):
                    await _first_of(event, stopped)
                case FailScript(error):
                    raise error
                case Queued():
                    yield item
                case _ if not stopped.is_set():
                    async for output in _emit(reply, item):
                        yield output
            if self._closed:
                raise EngineClosed
            if reply.ended is not None or stopped.is_set():
                yield reply.ended or Ended(Finish.STOPPED)
                return
        yield Ended(Finish.END)

    def choose_script(self, prompt: Prompt, own_ids: list[int]) -> Script:
        return self._script_for(own_ids) if prompt.reply_ids else self._next_script()

    def _restore(self, prompt: Prompt, sampling: Sampling) -> tuple[ReplyState, list[int]]:
        """The reply so far, and those of its tokens that are the script's own: all but the forced ones."""
        begun = replace(prompt, reply_ids=())
        reply = ReplyState(begun, sampling, self._vocabulary, self._info.end_ids, self._info.context_length)
        own_ids = []
        for token_id in prompt.reply_ids:
            if token_id != reply.forced_id:
                own_ids.append(token_id)
            reply.append_token(token_id)
        return reply, own_ids

    def _script_for(self, own_ids: list[int]) -> Script:
        """The script that begins with these tokens, or the current one."""
        if len(self._script_ids) < len(self._scripts):
            self._script_ids = [_tokens(script) for script in self._scripts]
        pairs = zip(self._scripts, self._script_ids, strict=True)
        matching = [script for script, ids in pairs if ids[: len(own_ids)] == own_ids]
        return matching[-1] if matching else self._scripts[max(0, self._next - 1) % len(self._scripts)]

    def _next_script(self) -> Script:
        script = self._scripts[self._next % len(self._scripts)]
        self._next += 1
        return script


class PacedEngine(ScriptedEngine):
    """A scripted engine that takes its time for each token, and has so many slots."""

    def __init__(self, scripts: Sequence[Script], vocabulary: Vocabulary, seconds: float, slots: int = 1024) -> None:
        super().__init__(scripts, vocabulary)
        self._seconds = seconds
        self._slots = asyncio.Semaphore(slots)

    async def metrics(self) -> dict[str, float]:
        return {"cancelled": self.cancelled}

    async def _outputs(
        self, prompt: Prompt, reply: ReplyState, own_ids: list[int], stopped: asyncio.Event
    ) -> AsyncGenerator[Output]:
        async with self._slots:
            due = time.monotonic()
            async for output in super()._outputs(prompt, reply, own_ids, stopped):
                if isinstance(output, Step) and self._seconds:
                    due = max(due + self._seconds, time.monotonic() - 10 * self._seconds)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                yield output


async def _emit(reply: ReplyState, item: int | Step) -> AsyncIterator[Output]:
    """The token, preceded by the forced ones."""
    while reply.forced_id is not None and reply.ended is None:
        forced = reply.forced_id
        reply.append_token(forced)
        yield Step(forced, 0.0)
    if reply.ended is None:
        step = item if isinstance(item, Step) else Step(item, 0.0)
        reply.append_token(step.token_id)
        yield step


def _tokens(script: Script) -> list[int]:
    return [item.token_id if isinstance(item, Step) else item for item in script if isinstance(item, int | Step)]


def _remaining(script: Script, count: int) -> Script:
    """The script after its first `count` tokens."""
    if all(type(item) is int for item in script[:count]):
        return script[count:]
    for index, item in enumerate(script):
        if count == 0:
            return script[index:]
        count -= isinstance(item, int | Step)
    return ()
