"""Stored turns as reply streams: turns that run here, that have ended, or that run in another process.

All readers of a turn get the same batches. Closing a reader does not stop the turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import cast

from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.reply_stream import BatchReader, ReplyOpening, ReplyRequest, ReplyStream, first_generated
from palaver.chat.turn_log import LogEntry, TurnLog, numbered
from palaver.chat.turns import Turn, Turns
from palaver.errors import EngineError, ModelError, PalaverError, RequestError, ShuttingDown
from palaver.events import Event, Failed, Finished, ReadEvent, ReplyBatch, Snapshot, Started, Usage, Waiting
from palaver.generation import Finish, Prompt
from palaver.store import NotFound, ReplyStatus, Store, StoredMessage
from palaver.store.leases import LEASE_SECONDS

POLL_S = 0.1
"""How often the tokens of another process are polled: the database does not notify."""
PATIENCE_S = LEASE_SECONDS
"""After this time without a token, the subscription checks whether the process that writes the reply is alive."""
INTERRUPTED = "The program that was writing this reply ended: it can be continued."
_FINISH = {ReplyStatus.DONE: Finish.END, ReplyStatus.STOPPED: Finish.STOPPED, ReplyStatus.LENGTH: Finish.LENGTH}


@dataclass(frozen=True, slots=True)
class _TurnSource:
    """A turn's batches, and the request and the prompt that they come from."""

    log: TurnLog
    """The batches so far. For a turn that runs here or has ended, also those to come."""
    batches: AsyncGenerator[ReplyBatch]
    request: ReplyRequest
    prompt: Prompt
    """The prompt without the tokens of earlier runs, which have batches."""
    opening: ReplyOpening = field(default_factory=ReplyOpening)
    turn: Turn | None = None
    """None unless it runs in this process, or has ended here recently."""


class FollowedReply(ReplyStream):
    """A stored turn, from its first token on. A turn that fails ends with `Failed`."""

    def __init__(self, turns: Turns, source: _TurnSource, raw: BatchReader | None = None) -> None:
        """`raw` reads the tokens again, as text that includes the thinking."""
        super().__init__(source.request, source.prompt, raw.opening if raw is not None else source.opening)
        self._turns = turns
        self._source = source
        self._raw = raw
        self._thinking_tokens = self.opening.thinking_tokens

    @property
    def thinking_tokens(self) -> int:
        return self._thinking_tokens

    @property
    def error(self) -> PalaverError | None:
        """The error that ended the turn here."""
        return self._source.turn.error if self._source.turn is not None else None

    @property
    def refusal(self) -> PalaverError | None:
        """The error of a request that the engine refused before the first token."""
        turn = self._source.turn
        if turn is None or turn.reply_stream.steps or not isinstance(turn.error, RequestError | ModelError):
            return None
        return turn.error

    @property
    def is_here(self) -> bool:
        """Whether the turn runs in this process, or has ended here recently."""
        return self._source.turn is not None

    @property
    def has_started(self) -> bool:
        """Whether the turn has left the queue."""
        return self._source.log.started

    def events_so_far(self) -> list[Event]:
        return self._source.log.events()

    def stop(self) -> None:
        """Stops the turn itself if it runs here."""
        turn = self._source.turn
        if turn is not None and not turn.log.ended:
            turn.reply_stream.stop()

    def failure(self, failed: Failed) -> PalaverError:
        return self.error or (ShuttingDown() if self._turns.closing else EngineError(failed.error))

    async def _run(self) -> AsyncGenerator[ReplyBatch]:
        self._events += self.opening.events
        if self.opening.events:
            yield self.opening.batch
        async with aclosing(self._source.batches) as batches:
            async for batch in batches:
                match batch.events[0]:
                    case Started() as started:
                        self._started = started
                        yield batch
                    case Waiting() | Snapshot():
                        yield batch
                    case event if batch.steps or isinstance(event, Finished | Failed):
                        for read in (batch,) if self._raw is None else self._read_raw(self._raw, batch):
                            self.steps += read.steps
                            self._events += read.events
                            self._thinking_tokens = max(self._thinking_tokens, read.thinking_tokens)
                            yield read
                    case _:
                        pass  # the opening

    def _read_raw(self, raw: BatchReader, batch: ReplyBatch) -> Iterator[ReplyBatch]:
        yield from raw.feed_all(batch.steps)
        if isinstance(last := batch.events[0], Finished | Failed):
            tail = raw.close()
            yield replace(tail, events=(replace(last, tail=cast("tuple[ReadEvent, ...]", tail.events)),))


class TurnSubscription:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests

    async def subscribe(self, model: Model | None, reply: StoredMessage, after: int) -> AsyncGenerator[LogEntry]:
        """The events after that number, to the end of the turn. A snapshot if the reply is of another tokenizer.

        Raises BadParameter at once for a number beyond the turn's events.
        """
        source = await self._source(model, reply)
        if source.turn is not None:
            await source.log.wait_for(after)
        source.log.check_number(after)
        return numbered(source.batches, after)

    async def stream(self, model: Model | None, reply: StoredMessage, raw: bool = False) -> FollowedReply:
        """The turn as a reply stream. `raw`: thinking and its markers are part of the text."""
        source = await self._source(model, reply)
        if not raw or model is None or not is_same_tokenizer(model, reply):
            return FollowedReply(self._turns, source)
        request = replace(source.request, options=replace(source.request.options, unsplit=True))
        reader = model.reader(request, source.prompt)
        return FollowedReply(self._turns, replace(source, request=request), BatchReader(reader, source.prompt))

    async def _source(self, model: Model | None, reply: StoredMessage) -> _TurnSource:
        turn = self._turns.get(reply.id)
        if turn is None:
            return await asyncio.to_thread(self._load_source, model, reply)
        stream, batches = turn.reply_stream, turn.log.follow()
        return _TurnSource(turn.log, batches, stream.request, stream.first_prompt, stream.opening, turn)

    def _load_source(self, model: Model | None, reply: StoredMessage) -> _TurnSource:
        """The source of a turn from its stored tokens."""
        if reply.reply is None:
            raise NotFound("turn", reply.id)
        if model is None or not is_same_tokenizer(model, reply):
            snapshot = Snapshot(self._store.messages.load(reply))
            log = TurnLog((ReplyBatch((snapshot,)), ReplyBatch((ended_event(reply),))))
            return _TurnSource(log, log.follow(), ReplyRequest((), reply.reply.settings.sampling), Prompt(()))
        owner = self._store.conversations.get(reply.conversation_id).owner_id
        request = self._requests.rebuild(model, reply, owner)
        steps = self._store.replies.tokens(reply.id)
        first = first_generated(steps)
        prompt = model.prompt(request, [step.token_id for step in steps[:first]])
        reader = BatchReader(model.reader(request, prompt), prompt)
        log = TurnLog(batch for batch in (reader.opening.batch, *reader.feed_all(steps[first:])) if batch.events)
        batches = log.follow()
        if _is_running(reply):
            batches = self._follow_store(reply, reader, log, len(steps))
        else:
            log.add(_ending(reply, reader))
        return _TurnSource(log, batches, request, prompt, reader.opening)

    async def _follow_store(
        self, reply: StoredMessage, reader: BatchReader, log: TurnLog, read: int
    ) -> AsyncGenerator[ReplyBatch]:
        """Follows the tokens that another process stores. The first `read` tokens are in the log already."""
        waited = 0.0
        for batch in log.so_far():
            yield batch
        while _is_running(reply):
            await asyncio.sleep(POLL_S)
            reply = await asyncio.to_thread(self._store.messages.get, reply.id)
            steps = await asyncio.to_thread(self._store.replies.tokens, reply.id)
            waited = waited + POLL_S if len(steps) == read else 0.0
            for batch in reader.feed_all(steps[read:]):
                yield batch
            read = len(steps)
            if waited >= PATIENCE_S:  # its process may be dead, and no other process may resume it
                waited = 0.0
                if _is_running(reply) and await asyncio.to_thread(self._store.replies.is_abandoned, reply.id):
                    tail = reader.close()
                    yield replace(tail, events=(Failed(INTERRUPTED, cast("tuple[ReadEvent, ...]", tail.events)),))
                    return
        yield _ending(reply, reader)


def _ending(reply: StoredMessage, reader: BatchReader) -> ReplyBatch:
    tail = reader.close()
    return replace(tail, events=(ended_event(reply, cast("tuple[ReadEvent, ...]", tail.events), reader.reader.stop),))


def ended_event(reply: StoredMessage, tail: tuple[ReadEvent, ...] = (), stop: str | None = None) -> Finished | Failed:
    """The last event of a stored reply; `stop` is the stop string that its reader found."""
    assert reply.reply is not None
    finish = _FINISH.get(reply.reply.status)
    if finish is None:
        return Failed(reply.reply.error or INTERRUPTED, tail)
    if finish is Finish.END and stop is not None:
        finish = Finish.STOP_STRING
    return Finished(finish, reply.reply.usage or Usage(), stop, tail)


def _is_running(reply: StoredMessage) -> bool:
    return reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING
