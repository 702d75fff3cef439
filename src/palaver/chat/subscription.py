"""Reading turns by number: those that run here, those that are over, and those that another process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.turn_log import LogEntry, TurnLog
from palaver.chat.turns import Turns
from palaver.events import Failed, Finished, ReadEvent, Snapshot, Usage
from palaver.formats.reader import ReplyReader
from palaver.generation import Finish
from palaver.store import NotFound, ReplyStatus, Store, StoredMessage
from palaver.store.leases import SECONDS

POLL_S = 0.1
"""How often a reply that another process writes is looked at: the database has no way to call."""
PATIENCE_S = SECONDS
"""After so long without a token it is checked whether the process that writes the reply still lives."""
INTERRUPTED = "The program that was writing this reply ended: it can be continued."
_FINISH = {ReplyStatus.DONE: Finish.END, ReplyStatus.STOPPED: Finish.STOPPED, ReplyStatus.LENGTH: Finish.LENGTH}


class TurnSubscription:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests

    async def read(self, model: Model | None, reply: StoredMessage, after: int) -> AsyncGenerator[LogEntry]:
        """The events after that number, to the end. Without the model that said it: a snapshot. BadParameter at once
        for a number that the turn never had."""
        turn = self._turns.get(reply.id)
        if turn is None and model is not None and is_same_tokenizer(model, reply) and _runs(reply):
            reader = await asyncio.to_thread(self._reader, model, reply, ())
            said = await asyncio.to_thread(self._store.replies.token_ids, reply.id)
            log = TurnLog((*reader.open(), *(event for token_id in said for event in reader.feed(token_id))))
            log.check(after)
            return self._elsewhere(model, reply, after, reader, log, len(said))
        log = turn.log if turn else await asyncio.to_thread(self._over, model, reply)
        await log.reaches(after)
        return log.read(after)

    def _over(self, model: Model | None, reply: StoredMessage) -> TurnLog:
        """The events of a reply as its tokens tell them."""
        if reply.reply is None:
            raise NotFound("turn", reply.id)
        if model is None or not is_same_tokenizer(model, reply):
            return TurnLog((Snapshot(self._store.messages.full(reply)), ended_event(reply)))
        reader = self._reader(model, reply, self._store.replies.token_ids(reply.id))
        events, tail = reader.open(), tuple(reader.close())
        return TurnLog((*events, ended_event(reply, tail, reader.stop)))

    def _reader(self, model: Model, reply: StoredMessage, said: tuple[int, ...]) -> ReplyReader:
        owner = self._store.conversations.get(reply.conversation_id).owner_id
        return model.reader(self._requests.of(model, reply, owner), said)

    async def _elsewhere(
        self, model: Model, reply: StoredMessage, after: int, reader: ReplyReader, log: TurnLog, read: int
    ) -> AsyncGenerator[LogEntry]:
        """Follows the tokens in the store, where they are before anybody hears of them; `read` are in the log."""
        waited = 0.0
        while _runs(reply):
            for entry in log.so_far(after):
                after = entry.number
                yield entry
            await asyncio.sleep(POLL_S)
            said = await asyncio.to_thread(self._store.replies.token_ids, reply.id)
            waited = waited + POLL_S if len(said) == read else 0.0
            if waited >= PATIENCE_S:  # its process may be dead, and no other one may take it over
                waited = 0.0
                if await asyncio.to_thread(self._store.replies.is_abandoned, reply.id):
                    yield LogEntry(after, Failed(INTERRUPTED, tuple(reader.close())))
                    return
            for token_id in said[read:]:
                for event in reader.feed(token_id):
                    log.tell(event)
            read = len(said)
            reply = await asyncio.to_thread(self._store.messages.get, reply.id)
        async for entry in (await asyncio.to_thread(self._over, model, reply)).read(after):
            yield entry


def ended_event(reply: StoredMessage, tail: tuple[ReadEvent, ...] = (), stop: str | None = None) -> Finished | Failed:
    """How a reply ended, by its record; `stop` is the stop string that its reader met."""
    assert reply.reply is not None
    finish = _FINISH.get(reply.reply.status)
    if finish is None:
        return Failed(reply.reply.error or INTERRUPTED, tail)
    if finish is Finish.END and stop is not None:
        finish = Finish.STOP_STRING
    return Finished(finish, reply.reply.usage or Usage(), stop, tail)


def _runs(reply: StoredMessage) -> bool:
    return reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING
