"""Subscriptions to the events of a turn: one that runs here, one that has ended, or one of another process."""

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
from palaver.store.leases import LEASE_SECONDS

POLL_S = 0.1
"""How often the tokens of another process are polled: the database does not notify."""
PATIENCE_S = LEASE_SECONDS
"""After this time without a token, the subscription checks whether the process that writes the reply is alive."""
INTERRUPTED = "The program that was writing this reply ended: it can be continued."
_FINISH = {ReplyStatus.DONE: Finish.END, ReplyStatus.STOPPED: Finish.STOPPED, ReplyStatus.LENGTH: Finish.LENGTH}


class TurnSubscription:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests

    async def subscribe(self, model: Model | None, reply: StoredMessage, after: int) -> AsyncGenerator[LogEntry]:
        """The events after that number, to the end of the turn. A snapshot if the reply is of another tokenizer.

        Raises BadParameter at once for a number beyond the turn's events.
        """
        turn = self._turns.get(reply.id)
        if turn is None and model is not None and is_same_tokenizer(model, reply) and _is_running(reply):
            reader = await asyncio.to_thread(self._reader, model, reply, ())
            token_ids = await asyncio.to_thread(self._store.replies.token_ids, reply.id)
            log = TurnLog((*reader.open(), *(event for token_id in token_ids for event in reader.feed(token_id))))
            log.check_number(after)
            return self._follow_store(model, reply, after, reader, log, len(token_ids))
        log = turn.log if turn else await asyncio.to_thread(self._ended_log, model, reply)
        await log.wait_for(after)
        return log.read(after)

    def _ended_log(self, model: Model | None, reply: StoredMessage) -> TurnLog:
        """The log of an ended reply, read from its stored tokens."""
        if reply.reply is None:
            raise NotFound("turn", reply.id)
        if model is None or not is_same_tokenizer(model, reply):
            return TurnLog((Snapshot(self._store.messages.load(reply)), ended_event(reply)))
        reader = self._reader(model, reply, self._store.replies.token_ids(reply.id))
        events, tail = reader.open(), tuple(reader.close())
        return TurnLog((*events, ended_event(reply, tail, reader.stop)))

    def _reader(self, model: Model, reply: StoredMessage, token_ids: tuple[int, ...]) -> ReplyReader:
        owner = self._store.conversations.get(reply.conversation_id).owner_id
        return model.reader(self._requests.rebuild(model, reply, owner), token_ids)

    async def _follow_store(
        self, model: Model, reply: StoredMessage, after: int, reader: ReplyReader, log: TurnLog, read: int
    ) -> AsyncGenerator[LogEntry]:
        """Follows the tokens that another process stores. The first `read` tokens are in the log already."""
        waited = 0.0
        while _is_running(reply):
            for entry in log.entries(after):
                after = entry.number
                yield entry
            await asyncio.sleep(POLL_S)
            token_ids = await asyncio.to_thread(self._store.replies.token_ids, reply.id)
            waited = waited + POLL_S if len(token_ids) == read else 0.0
            if waited >= PATIENCE_S:  # its process may be dead, and no other process may resume it
                waited = 0.0
                if await asyncio.to_thread(self._store.replies.is_abandoned, reply.id):
                    yield LogEntry(after, Failed(INTERRUPTED, tuple(reader.close())))
                    return
            for token_id in token_ids[read:]:
                for event in reader.feed(token_id):
                    log.append(event)
            read = len(token_ids)
            reply = await asyncio.to_thread(self._store.messages.get, reply.id)
        async for entry in (await asyncio.to_thread(self._ended_log, model, reply)).read(after):
            yield entry


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
