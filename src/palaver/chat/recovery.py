"""After a crash: takes over the replies of processes that ended, and lets each wait for its model."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import to_thread
from collections.abc import Sequence
from functools import partial

from palaver.chat.continuation import is_same_tokenizer
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.turn_log import outlast_all
from palaver.chat.turns import Turns
from palaver.errors import PalaverError
from palaver.events import fold
from palaver.messages import Part
from palaver.store import ReplyEnding, ReplyStatus, Store, StoredMessage

_log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""How long the replies of a model wait after it could not be loaded, before that is tried again."""


class Recovery:
    def __init__(self, store: Store, turns: Turns, requests: RequestBuilder) -> None:
        self._store = store
        self._turns = turns
        self._requests = requests
        self._resuming: dict[str, asyncio.Task[None]] = {}
        """By the name of the model: the tasks that load it and resume its replies."""
        self._retry_at: dict[str, float] = {}
        """When a model that could not be loaded is tried again."""
        self._waiting: set[str] = set()
        """The models for which replies wait, as it was logged."""

    async def interrupt(self, models: ModelPool) -> None:
        """Marks the replies of dead processes as interrupted, and writes their text from their tokens."""
        for id in await self._turns.interrupt_orphans():
            try:
                await self._rewrite(models, await to_thread(self._store.messages.get, id))
            except Exception as error:
                _log.warning("a reply that another process left was not recovered: %s", error)

    async def resume(self, models: ModelPool, tasks: asyncio.TaskGroup) -> None:
        """Starts to resume the replies of dead processes. Those of one model don't wait for another model; those of a
        model that is not offered here wait for a process that offers it."""
        by_model: dict[str, list[str]] = {}
        for id, name in (await self._turns.list_orphans()).items():
            by_model.setdefault(name, []).append(id)
        for name, ids in by_model.items():
            if name not in self._resuming and self._retry_at.get(name, 0.0) <= time.monotonic():
                self._resuming[name] = tasks.create_task(self._resume_all(models, name, ids))

    async def wait(self, model: str | None = None) -> bool:
        """Waits until the replies of this model that `resume` found, or all of them, are resumed or can't be now.

        Returns whether there were any.
        """
        tasks = [task for name, task in self._resuming.items() if model in (None, name)]
        if tasks:
            await asyncio.wait(tasks)
        return bool(tasks)

    async def _resume_all(self, models: ModelPool, name: str, ids: Sequence[str]) -> None:
        """One that fails is marked interrupted and keeps its tokens."""
        try:
            model = await self._load_model(models, name, ids)
            if model is None or self._turns.closing:
                return
            for id in await self._turns.claim_orphans(ids):
                try:
                    await outlast_all(partial(self._take_over, model, id))
                except Exception as error:
                    _log.warning("a reply that another process left was not recovered: %s", error)
                    await self._turns.end_recovering(id, ReplyEnding(ReplyStatus.INTERRUPTED, None))
        except Exception:
            _log.exception("replies that another process left were not recovered")
        finally:
            del self._resuming[name]

    async def _load_model(self, models: ModelPool, name: str, ids: Sequence[str]) -> Model | None:
        """The model that continues the replies; None if it is not offered here, or can't be loaded now."""
        if name and not models.offers(name):
            self._log_waiting(name, len(ids), "it is not offered here")
            return None
        try:
            model = await models.for_reply(name)
        except Exception as error:
            self._retry_at[name] = time.monotonic() + RETRY_SECONDS
            if not isinstance(error, PalaverError):
                raise
            self._log_waiting(name, len(ids), str(error))
            return None
        self._waiting.discard(name)
        return model

    def _log_waiting(self, name: str, count: int, why: str) -> None:
        """Logs that replies wait for their model, once until it is loaded."""
        if name not in self._waiting:
            self._waiting.add(name)
            _log.warning("%d replies wait for a server with the model %s: %s", count, name, why)

    async def _rewrite(self, models: ModelPool, reply: StoredMessage) -> None:
        """Writes the text of an interrupted reply from its tokens."""
        assert reply.reply is not None
        settings = reply.reply.settings
        model = models.reader_for(settings.model, settings.tokenizer)
        if model is not None and is_same_tokenizer(model, reply):
            parts = await to_thread(self._fold_tokens, model, reply)
            await to_thread(self._store.replies.rewrite, reply.id, parts)

    async def _take_over(self, model: Model, id: str) -> None:
        reply = await to_thread(self._store.messages.get, id)
        assert reply.reply is not None
        if not is_same_tokenizer(model, reply):
            await self._turns.end_recovering(reply.id, ReplyEnding(ReplyStatus.INTERRUPTED, None))
            return
        conversation = await to_thread(self._store.conversations.get, reply.conversation_id)
        request = await to_thread(self._requests.rebuild, model, reply, conversation.owner_id)
        steps = await to_thread(self._store.replies.tokens, reply.id)
        await self._turns.take_over(model, reply, request, steps)

    def _fold_tokens(self, model: Model, reply: StoredMessage) -> tuple[Part, ...]:
        """The parts of the message that the reply's tokens encode."""
        owner = self._store.conversations.get(reply.conversation_id, deleted=True).owner_id
        request = self._requests.rebuild(model, reply, owner)
        reader = model.reader(request, model.prompt(request, self._store.replies.token_ids(reply.id)))
        return fold((*reader.open(), *reader.close())).message.parts
