"""The service: a store, a model and the turns between them, for all users of one process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from palaver.chat.change_feed import ChangeFeed
from palaver.chat.continuation import Continuation
from palaver.chat.interface import ModelState
from palaver.chat.local_chat import LocalChat
from palaver.chat.model_loader import ModelSlot
from palaver.chat.recovery import Recovery, is_same_tokenizer
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.subscription import TurnSubscription
from palaver.chat.turns import Turns
from palaver.errors import PalaverError
from palaver.store import Store, StoredMessage
from palaver.store.leases import SECONDS

_log = logging.getLogger(__name__)
LOOK_AGAIN_S = SECONDS / 3
"""How often it is looked for replies that another process left."""


class Service:
    """Enter it to take up the work, leave it to put aside what runs. The store stays its owner's."""

    def __init__(self, store: Store, models: ModelSlot, *, resume: bool = False) -> None:
        """`resume`: whether replies that a dead process left are gone on with; else they are marked interrupted."""
        self.store = store
        self.models = models
        self.changes = ChangeFeed()
        self.turns = Turns(store, self.changes)
        self.requests = RequestBuilder(store)
        self.continuing = Continuation(store, self.turns, self.requests)
        self.reading = TurnSubscription(store, self.turns, self.requests)
        self.recovered = asyncio.Event()
        """Set when what an earlier process left has been taken care of."""
        self.resumes = resume
        self.continues: Callable[[StoredMessage], bool] | None = None
        """Tells which interrupted replies are continued when the service starts, though nobody asks for it."""
        self._recovery = Recovery(store, self.turns, self.requests, resume)
        self.uploads: set[tuple[str, str]] = set()
        """Blobs that no message names yet, and who put them there."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Service:
        await self._stack.enter_async_context(self.turns)
        self.models.park = self.turns.park
        recovering = asyncio.create_task(self._recover())
        self._stack.push_async_callback(_ended, recovering)
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._stack.aclose()
        finally:
            await self.models.unload()

    def chat(self, owner: str) -> LocalChat:
        """The interface for one user, by its id."""
        return LocalChat(self, owner)

    async def _recover(self) -> None:
        """When the model is there, because only its format can read what was said. Another process may die any time."""
        try:
            done = await self._recover_once()
            if done and self.resumes and self.continues is not None:
                await self._continue_interrupted(self.continues)
        finally:
            self.recovered.set()
        while self.resumes or not done:
            await asyncio.sleep(LOOK_AGAIN_S)
            if self.models.card().state is ModelState.READY and not self.turns.closing:
                done = await self._recover_once()

    async def _continue_interrupted(self, wanted: Callable[[StoredMessage], bool]) -> None:
        try:
            model = self.models.current()
            replies = await asyncio.to_thread(self.store.replies.interrupted)
        except PalaverError as error:
            _log.warning("interrupted replies were not continued: %s", error)
            return
        for reply in replies:
            if not wanted(reply) or not is_same_tokenizer(model, reply):
                continue
            try:
                conversation = await asyncio.to_thread(self.store.conversations.get, reply.conversation_id)
                await self.continuing.go_on(model, conversation, reply)
            except Exception as error:
                _log.warning("an interrupted reply was not continued: %s", error)

    async def _recover_once(self) -> bool:
        """Whether it was done. Where not, those replies stay as they are, all else goes on, and it is tried again."""
        try:
            await self._recovery.run(await self.models.ready())
        except PalaverError as error:
            _log.warning("what another process left was not recovered: %s", error)
            return False
        except Exception:
            _log.exception("what another process left was not recovered")
            return False
        return True


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
