"""Stored turns as reply streams: turns that run here, that have ended, or that run in another process.

All readers of a turn get the same batches. Closing a reader does not stop the turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from palaver.chat.continuation import is_same_tokenizer
from palaver.chat.fronts import Fronts
from palaver.chat.model import Model
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.reply_stream import BatchReader, ReplyOpening, ReplyRequest, ReplyStream, first_generated
from palaver.chat.turn_log import LogEntry, TurnLog, numbered, outlast
from palaver.chat.turns import LOST, Turn, Turns
from palaver.errors import BadParameter, EngineError, ModelError, PalaverError, RequestError
from palaver.events import DraftBlock, Failed, Finished, ReadEvent, ReplyBatch, Snapshot, Started, Usage, Waiting
from palaver.generation import Finish, Prompt
from palaver.store import NotFound, ReplyStatus, Store, StoredMessage
from palaver.store.leases import LEASE_SECONDS
from palaver.store.records import StoredReply
from palaver.store.replies import NewTokens

PATIENCE_S = LEASE_SECONDS
"""After this time without a token, the subscription checks whether the process that writes the reply is alive."""
MENDING_S = 5.0
"""How long a reader with a number beyond the turn's events waits: a database that restarted may have lost the last ones
until their process stores them again."""
INTERRUPTED = "The program that was writing this reply ended. It can be continued."
_FINISH = {ReplyStatus.DONE: Finish.END, ReplyStatus.STOPPED: Finish.STOPPED, ReplyStatus.LENGTH: Finish.LENGTH}


class FollowedReply(ReplyStream):
    """A stored turn, from its first token on. A turn that fails ends with `Failed`."""

    def __init__(
        self,
        request: ReplyRequest,
        prompt: Prompt,
        opening: ReplyOpening,
        log: TurnLog,
        turn: Turn | None = None,
        source: AsyncGenerator[ReplyBatch] | None = None,
    ) -> None:
        """`prompt` is without the tokens of earlier runs, which have batches. `turn` runs here, or has ended here
        recently. `source` has the turn's batches if the log has only those so far."""
        super().__init__(request, prompt, opening)
        self.log = log
        self._turn = turn
        self.source = source or log.follow()
        self._raw: BatchReader | None = None
        self._thinking_tokens = opening.thinking_tokens

    def read_raw(self, model: Model) -> None:
        """Reads the tokens again, as text that includes the thinking and its markers. Call before the first batch."""
        self.request = replace(self.request, options=replace(self.request.options, unsplit=True))
        self._raw = BatchReader(model.reader(self.request, self.prompt), self.prompt)
        self.opening = self._raw.opening

    @property
    def thinking_tokens(self) -> int:
        return self._thinking_tokens

    @property
    def error(self) -> PalaverError | None:
        """The error that ended the turn here."""
        return self._turn.error if self._turn is not None else None

    @property
    def refusal(self) -> PalaverError | None:
        """The error of a request that the engine refused before the first token."""
        refused = isinstance(self.error, RequestError | ModelError) and not any(b.steps for b in self.log.so_far())
        return self.error if refused else None

    @property
    def is_here(self) -> bool:
        """Whether the turn runs in this process, or has ended here recently."""
        return self._turn is not None

    def stop(self) -> None:
        """Stops the turn itself if it runs here."""
        if self._turn is not None and not self.log.ended:
            self._turn.reply_stream.stop()

    def failure(self, failed: Failed) -> PalaverError:
        return self.error or EngineError(failed.error)

    async def _run(self) -> AsyncGenerator[ReplyBatch]:
        self._events += self.opening.events
        if self.opening.events:
            yield self.opening.batch
        async with aclosing(self.source) as batches:
            async for batch in batches:
                match batch.events[0]:
                    case Started() as started:
                        self.started = started
                        yield batch
                    case Waiting() | Snapshot() | DraftBlock():
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
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder, fronts: Fronts) -> None:
        self._store = store
        self._turns = turns
        self._fronts = fronts
        self._requests = requests

    async def subscribe(
        self, model: Model | None, reply: StoredMessage, owner: str, after: int
    ) -> AsyncGenerator[LogEntry]:
        """The events after that number, to the end of the turn. A snapshot if the reply is of another tokenizer.

        Raises BadParameter for a number beyond the turn's events: at once, unless it runs in another process.
        """
        begun = time.monotonic()
        while True:
            stream = await self.stream(model, reply, owner)
            if stream.is_here:
                await stream.log.wait_for(after)
            try:
                stream.log.check_number(after)
                return numbered(stream.source, after)
            except BadParameter:
                await stream.source.aclose()
                if stream.is_here or not _is_running(reply) or time.monotonic() - begun > MENDING_S:
                    raise
            await asyncio.sleep(MENDING_S / 20)
            reply = await outlast(self._store.messages.get, reply.id)

    async def stream(self, model: Model | None, reply: StoredMessage, owner: str, raw: bool = False) -> FollowedReply:
        """The turn as a reply stream. `raw`: thinking and its markers are part of the text."""
        turn = await self._turns.find(reply)
        if turn is None:
            stream = await asyncio.to_thread(self._load, model, reply, owner)
        else:
            running = turn.reply_stream
            batches = self._follow_turn(turn, model)
            stream = FollowedReply(running.request, running.first_prompt, running.opening, turn.log, turn, batches)
        if raw and model is not None and is_same_tokenizer(model, reply):
            stream.read_raw(model)
        return stream

    async def _follow_turn(self, turn: Turn, model: Model | None) -> AsyncGenerator[ReplyBatch]:
        """The batches of a turn that runs here, and of the process that takes it over if the lease is lost.

        `Started` says how long the reply has been thinking when it is sent.
        """
        sent = 0
        async with aclosing(turn.log.follow()) as batches:
            async for batch in batches:
                first = batch.events[0]
                if isinstance(first, Failed) and first.error == LOST and model is not None:
                    break
                if isinstance(first, Started):
                    batch = replace(batch, events=(replace(first, thinking_seconds=turn.timer.thinking),))
                sent += isinstance(first, ReadEvent)
                yield batch
            else:
                return
        reply = await outlast(self._store.messages.get, turn.id)
        elsewhere = await outlast(self._load, model, reply, turn.owner)
        async with aclosing(elsewhere.source) as batches:
            async for batch in batches:
                if isinstance(batch.events[0], ReadEvent) and sent:
                    sent -= 1  # the same tokens make the same batches
                    continue
                yield batch

    def _load(self, model: Model | None, reply: StoredMessage, owner: str) -> FollowedReply:
        """The stream of a turn from its stored tokens."""
        if reply.reply is None:
            raise NotFound("turn", reply.id)
        if model is None or not is_same_tokenizer(model, reply):
            snapshot = Snapshot(self._store.messages.load(reply))
            log = TurnLog((ReplyBatch((snapshot,)), ReplyBatch((ended_event(reply),))))
            return FollowedReply(ReplyRequest((), reply.reply.settings.sampling), Prompt(()), ReplyOpening(), log)
        request = self._requests.rebuild(model, reply, owner)
        steps = self._store.replies.tokens(reply.id)
        first = first_generated(steps)
        prompt = model.prompt(request, [step.token_id for step in steps[:first]])
        reader = BatchReader(model.reader(request, prompt), prompt)
        log = TurnLog(batch for batch in (reader.opening.batch, *reader.feed_all(steps[first:])) if batch.events)
        source = self._follow_store(reply, reader, log, len(steps)) if _is_running(reply) else None
        if source is None:
            log.add(_ending(reply.reply, reader))
        return FollowedReply(request, prompt, reader.opening, log, source=source)

    async def _follow_store(
        self, reply: StoredMessage, reader: BatchReader, log: TurnLog, read: int
    ) -> AsyncGenerator[ReplyBatch]:
        """Follows the tokens that another process stores. The first `read` tokens are in the log already."""
        timings = await outlast(self._store.replies.watch, reply.id)
        thinking = timings.get("thinking") if read else 0.0
        yield ReplyBatch((Started(len(reader.prompt), 0, thinking_seconds=thinking),))
        for batch in log.so_far():
            yield batch
        last_token_at = time.monotonic()
        with self._fronts.follow(reply.id) as tokens:
            new = await self._fronts.read(reply.id, read)
            while True:
                read += len(new.steps)
                for batch in reader.feed_all(new.steps):
                    yield batch
                if new.status is not ReplyStatus.RUNNING:
                    break
                if new.steps:
                    last_token_at = time.monotonic()
                elif time.monotonic() - last_token_at >= PATIENCE_S:
                    last_token_at = time.monotonic()
                    if await outlast(self._store.replies.is_abandoned, reply.id):
                        tail = reader.close()
                        yield replace(tail, events=(Failed(INTERRUPTED, cast("tuple[ReadEvent, ...]", tail.events)),))
                        return
                new = await tokens.read(read)
        yield _ending(new, reader)


def _ending(ended: StoredReply | NewTokens, reader: BatchReader) -> ReplyBatch:
    tail = reader.close()
    return replace(tail, events=(_ended_event(ended, cast("tuple[ReadEvent, ...]", tail.events), reader.reader.stop),))


def ended_event(reply: StoredMessage) -> Finished | Failed:
    """The last event of a stored reply, without the text that its reader held back."""
    assert reply.reply is not None
    return _ended_event(reply.reply)


def _ended_event(
    ended: StoredReply | NewTokens, tail: tuple[ReadEvent, ...] = (), stop: str | None = None
) -> Finished | Failed:
    """`stop` is the stop string that the reader of the reply found."""
    finish = _FINISH.get(ended.status)
    if finish is None:
        return Failed(ended.error or INTERRUPTED, tail)
    if finish is Finish.END and stop is not None:
        finish = Finish.STOP_STRING
    return Finished(finish, ended.usage or Usage(), stop, tail)


def _is_running(reply: StoredMessage) -> bool:
    return reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING
