"""The service: the store, the model and the turns of one process, for all users."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from palaver.chat.continuation import Continuation, Recovery, is_same_tokenizer
from palaver.chat.interface import ModelState
from palaver.chat.local_chat import LocalChat
from palaver.chat.model_slot import ModelSlot
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.subscription import TurnSubscription
from palaver.chat.turns import ChangeFeed, Turns
from palaver.errors import PalaverError
from palaver.media import MediaDecoder
from palaver.store import Store, StoredMessage
from palaver.store.leases import LEASE_SECONDS

_log = logging.getLogger(__name__)
RECOVERY_INTERVAL_S = LEASE_SECONDS / 3
"""How often the service looks for replies of dead processes."""


class Service:
    """Entering starts the recovery, leaving parks the running turns. The owner of the store closes it."""

    def __init__(self, store: Store, models: ModelSlot, *, resume: bool = False) -> None:
        """`resume`: whether to resume the replies of dead processes; else they are marked interrupted."""
        self.store = store
        self.models = models
        self.changes = ChangeFeed()
        self.turns = Turns(store, self.changes)
        self.requests = RequestBuilder(store)
        self.continuation = Continuation(store, self.turns, self.requests)
        self.subscriptions = TurnSubscription(store, self.turns, self.requests)
        self.recovered = asyncio.Event()
        """Set when the replies of dead processes have been recovered."""
        self.resume = resume
        self.should_continue: Callable[[StoredMessage], bool] | None = None
        """Selects the interrupted replies that are continued when the service starts."""
        self._recovery = Recovery(store, self.turns, self.requests, resume)
        self.uploads: set[tuple[str, str]] = set()
        """Blobs that no message refers to yet, as pairs of owner and digest."""
        self.media = MediaDecoder()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Service:
        await self._stack.enter_async_context(self.turns)
        self.models.park = self.turns.park
        recovering = asyncio.create_task(self._recover())
        self._stack.push_async_callback(_cancel, recovering)
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._stack.aclose()
        finally:
            await asyncio.to_thread(self.media.close)
            await self.models.unload()

    def chat(self, owner: str) -> LocalChat:
        """The chat interface for one user, by id."""
        return LocalChat(self, owner)

    async def _recover(self) -> None:
        """Recovers once the model is loaded, since its format reads the tokens, and then repeatedly."""
        try:
            done = await self._recover_once()
            if done and self.resume and self.should_continue is not None:
                await self._continue_interrupted(self.should_continue)
        finally:
            self.recovered.set()
        while self.resume or not done:
            await asyncio.sleep(RECOVERY_INTERVAL_S)
            if self.models.card().state is ModelState.READY and not self.turns.closing:
                done = await self._recover_once()

    async def _continue_interrupted(self, should_continue: Callable[[StoredMessage], bool]) -> None:
        try:
            model = self.models.current()
            replies = await asyncio.to_thread(self.store.replies.list_interrupted)
        except PalaverError as error:
            _log.warning("interrupted replies were not continued: %s", error)
            return
        for reply in replies:
            if not should_continue(reply) or not is_same_tokenizer(model, reply):
                continue
            try:
                conversation = await asyncio.to_thread(self.store.conversations.get, reply.conversation_id)
                await self.continuation.continue_reply(model, conversation, reply)
            except Exception as error:
                _log.warning("an interrupted reply was not continued: %s", error)

    async def _recover_once(self) -> bool:
        """Whether it succeeded. If not, the replies stay as they are, and it is tried again later."""
        try:
            await self._recovery.run(await self.models.ready())
        except PalaverError as error:
            _log.warning("what another process left was not recovered: %s", error)
            return False
        except Exception:
            _log.exception("what another process left was not recovered")
            return False
        return True


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
