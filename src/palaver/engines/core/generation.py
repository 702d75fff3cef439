"""One generation: the state of its reply, and its outputs, which the worker's thread produces and the caller's event
loop reads.

The state of a reply is a function of prompt, sampling and tokens, so a stopped reply is restored by appending its
tokens again. The caller sends commands (submit, cancel, answer now) to the worker; the outbox wakes the callers that
wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType

from palaver.constraints import Constraint
from palaver.engines.core.media import MissingMedia, ProcessedMedia
from palaver.engines.grammars import CompiledGrammar
from palaver.errors import PalaverError
from palaver.generation import AnswerRequested, Ended, Finish, MediaItem, Output, Prefilled, Prompt, Step
from palaver.phases import Phase, Phases, StateEntered, StateText, StopMatched, Tracker, TrackerEvent, Vocabulary
from palaver.sampling import Sampling


class ReplyState:
    """Follows the tokens of one reply: stop conditions, limits, thinking budget and forced tokens."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        vocabulary: Vocabulary,
        end_ids: frozenset[int] = frozenset(),
        context_length: int | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.ended: Ended | None = None
        self._phases = prompt.phases
        self._sampling = sampling
        self._max_tokens = _max_tokens(sampling, context_length, len(prompt.context_ids))
        self._end_ids = prompt.phases.ends | end_ids
        self._stop_ids = frozenset(sampling.stop_ids)
        self._tracked = bool(sampling.stop) or any(s.triggers or s.other is not None for s in prompt.phases.states)
        self._tracker = Tracker(prompt.phases, vocabulary, sampling.stop)
        self._stop_ids_cache: dict[int, frozenset[int]] = {}
        self._forced_ids: tuple[int, ...] = ()
        self._answer_at = prompt.answer_at
        self._thinking_tokens = 0
        self.text_since_transition = b""
        """The text of the last token that belongs to the state it led to."""
        self._check_limits()
        for token_id in prompt.reply_ids:
            self.append_token(token_id)

    @property
    def state(self) -> int:
        return self._tracker.state

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    @property
    def buffered(self) -> bytes:
        """Text that is held back because it may become a marker."""
        return self._tracker.buffered

    @property
    def tokens_left(self) -> int | None:
        """How many more tokens the limits allow."""
        return None if self._max_tokens is None else self._max_tokens - len(self.token_ids)

    @property
    def at_limit(self) -> bool:
        """Whether the next token is the last one, whatever it is."""
        return self.tokens_left is not None and self.tokens_left <= 1

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, whatever the logits are; None if the model is free."""
        return self._forced_ids[0] if self._forced_ids else None

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """All tokens that must come next."""
        return self._forced_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that would end the reply now."""
        state = self._tracker.state
        if state not in self._stop_ids_cache:
            self._stop_ids_cache[state] = self._stop_ids | _ending_ids(self._phases, state, self._end_ids)
        return self._stop_ids_cache[state]

    @property
    def always_stop_ids(self) -> frozenset[int]:
        """Token ids that end the reply in every state."""
        markers = {trigger.marker for state in self._phases.states for trigger in state.triggers}
        return self._stop_ids | (self._end_ids - markers)

    def answer_now(self, position: int | None = None) -> int:
        """Closes an open thought from the next token on, or from `position` on. Returns the position that holds: the
        first one that was requested."""
        if self._answer_at is None:
            self._answer_at = len(self.token_ids) if position is None else position
        self._force_closing()
        return self._answer_at

    def append_token(self, token_id: int) -> None:
        """Appends a generated token. Does nothing after the reply has ended."""
        if self.ended is not None:
            return
        self.token_ids.append(token_id)
        ends = token_id in self.stop_token_ids
        if self._tracked or ends:
            self._thinking_tokens += self.phase is Phase.THINKING
            self._track(token_id, ends)
        elif self.phase is Phase.THINKING:
            self._thinking_tokens += 1
        self._advance_forced(token_id)
        if self.ended is None:
            self._check_limits()

    def _track(self, token_id: int, ends: bool) -> None:
        happenings = self._tracker.feed(token_id)
        if ends:
            happenings += self._tracker.flush()
        self.text_since_transition = _text_since_transition(happenings)
        stop = next((happening.stop for happening in happenings if isinstance(happening, StopMatched)), None)
        if stop is not None:
            self.ended = Ended(Finish.STOP_STRING, stop)
        elif ends or self._tracker.ended:
            self.ended = Ended(Finish.END)

    def _advance_forced(self, token_id: int) -> None:
        if self._forced_ids and self._forced_ids[0] == token_id:
            self._forced_ids = self._forced_ids[1:]
        else:
            self._forced_ids = ()
        if not self._forced_ids:
            self._force_closing()

    def _force_closing(self) -> None:
        """Forces the closing of a thought whose budget is spent, or whose answer was asked for."""
        budget = self._sampling.thinking_budget
        asked = self._answer_at is not None and len(self.token_ids) >= self._answer_at
        spent = asked or (budget is not None and self._thinking_tokens >= budget)
        if spent and not self._forced_ids and self.phase is Phase.THINKING:
            closing = self._phases.states[self._tracker.state].closing
            self._forced_ids = closing[self._closing_tokens_written(closing) if asked else 0 :]

    def _closing_tokens_written(self, closing: tuple[int, ...]) -> int:
        """How many tokens of the closing the reply ends with: it may have been stopped inside of one."""
        sizes = range(len(closing) - 1, 0, -1)
        return next((size for size in sizes if tuple(self.token_ids[-size:]) == closing[:size]), 0)

    def _check_limits(self) -> None:
        if self._max_tokens is not None and len(self.token_ids) >= self._max_tokens:
            self.ended = Ended(Finish.LENGTH)
        elif not self.token_ids:
            self._force_closing()


def _text_since_transition(happenings: list[TrackerEvent]) -> bytes:
    text = b""
    for happening in happenings:
        match happening:
            case StateEntered():
                text = b""
            case StateText(_, data):
                text += data
    return text


def _max_tokens(sampling: Sampling, context_length: int | None, context: int) -> int | None:
    limits = [sampling.max_tokens, None if context_length is None else max(0, context_length - context)]
    return min((limit for limit in limits if limit is not None), default=None)


def _ending_ids(phases: Phases, state: int, ends: frozenset[int]) -> frozenset[int]:
    """Token ids that end the turn in this state. A trigger of the state takes precedence over the turn's end ids."""
    triggers = {t.marker: t for t in phases.states[state].triggers if isinstance(t.marker, int)}
    to_end = {marker for marker, t in triggers.items() if phases.states[t.to].phase is Phase.END}
    return frozenset(to_end | (ends - triggers.keys()))


MIN_WAKE_INTERVAL_S, MAX_WAKE_INTERVAL_S = 0.008, 0.032
"""Readers are woken at most this often while only tokens arrive: waking a reader costs as much as sampling."""
WAKE_INTERVAL_PER_READER_S = 0.001
"""Many readers are woken more seldom, with more tokens each, so that waking them takes a bounded share of the time."""
EAGER_TOKENS = 4
"""The first tokens of a reply wake their reader at once: they are seldom visible text."""


class PendingStep:
    """A step whose alternatives are not read yet. The reader of the reply reads them, so that the worker's thread can
    start the next pass."""

    __slots__ = ("_build", "token_id")

    def __init__(self, token_id: int, build: Callable[[], Step]) -> None:
        self.token_id = token_id
        self._build = build

    def build(self) -> Step:
        return self._build()


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
        """Does what precedes the submission, such as compiling grammars. Entering the context does what is left."""
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
        healing = b"" if self._generated_ids else self.prompt.healing
        self.prompt = replace(self.prompt, reply_ids=reply_ids, healing=healing)
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
