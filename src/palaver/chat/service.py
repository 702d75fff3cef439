"""The service: the store, the model and the turns of one process, for all users."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from palaver.chat.continuation import Continuation, is_same_tokenizer
from palaver.chat.fronts import Fronts
from palaver.chat.interface import ModelState
from palaver.chat.local_chat import LocalChat
from palaver.chat.model_pool import ModelPool
from palaver.chat.recovery import Recovery
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.subscription import TurnSubscription
from palaver.chat.title_writer import TitleWriter
from palaver.chat.tool_loop import ToolLoop, server_calls
from palaver.chat.turns import ChangeFeed, Turns
from palaver.errors import PalaverError
from palaver.media import MediaDecoder
from palaver.store import Store, StoredMessage
from palaver.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from palaver.voice.transcription import Transcriber

_log = logging.getLogger(__name__)
RECOVERY_INTERVAL_S = 2.0
"""How often the service looks for replies of dead processes."""


class Service:
    """Entering starts the recovery, leaving parks the running turns. The owner of the store closes it."""

    def __init__(
        self,
        store: Store,
        models: ModelPool,
        *,
        resume: bool = False,
        transcriber: str = "",
        toolbox: Toolbox | None = None,
        titles: bool = False,
    ) -> None:
        """`resume`: whether to resume the replies of dead processes; else they are marked interrupted. `transcriber`:
        the folder or hub id of a speech recognition model. `titles`: whether the model writes titles when idle."""
        self.store = store
        self.models = models
        self.changes = ChangeFeed()
        self.turns = Turns(store, self.changes)
        self.requests = RequestBuilder(store)
        self.continuation = Continuation(store, self.turns, self.requests)
        self.fronts = Fronts(store, self.turns, self.changes)
        self.subscriptions = TurnSubscription(store, self.turns, self.requests, self.fronts)
        self.recovered = asyncio.Event()
        """Set when the replies of dead processes have been recovered, as far as their models could be loaded."""
        self._recovering = asyncio.Event()
        """Set when the recovery of all of them has begun."""
        self.resume = resume
        self.should_continue: Callable[[StoredMessage], bool] | None = None
        """Selects the interrupted replies that are continued when the service starts."""
        self.loop = ToolLoop(self, toolbox or Toolbox())
        self.turns.calls_of, self.turns.on_calls = server_calls, self.loop.reply_ended
        self.fronts.on_round_stopped, self.fronts.on_cache_cleared = self.loop.cancel_calls, models.forget
        self.titles = TitleWriter(self) if titles else None
        self._recovery = Recovery(store, self.turns, self.requests)
        self.media = models.decoder = MediaDecoder()
        self.transcriber_name = transcriber
        self._transcriber: Transcriber | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Service:
        await self._stack.enter_async_context(self.fronts)
        await self._stack.enter_async_context(self.turns)
        self.models.park = self.turns.park
        recovering = asyncio.create_task(self._recover())
        self._stack.push_async_callback(self.loop.close)
        self._stack.push_async_callback(_cancel, recovering)
        if self.titles is not None:
            await self._stack.enter_async_context(self.titles)
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._stack.aclose()
        finally:
            await asyncio.to_thread(self.media.close)
            if self._transcriber is not None:
                await self._transcriber.close()
            await self.models.unload()

    def chat(self, owner: str, is_local: bool = False) -> LocalChat:
        """The chat interface for one user, by id. `is_local`: see `LocalChat`."""
        return LocalChat(self, owner, is_local)

    async def clear_cache(self, conversation_id: str) -> None:
        """Frees what the engines hold of a conversation, in all processes."""
        self.fronts.clear_cache(conversation_id)
        await self.models.forget(conversation_id)

    @property
    def transcriber(self) -> Transcriber:
        """Loads its model on first use. Raises NoTranscriber."""
        from palaver.voice.transcription import NoTranscriber, Transcriber

        if not self.transcriber_name:
            raise NoTranscriber
        if self._transcriber is None:
            self._transcriber = Transcriber(self.transcriber_name)
        return self._transcriber

    async def wait_recovered(self, model: str) -> bool:
        """Waits until the replies of dead processes that this model wrote are recovered, or can't be for now.

        Returns whether there was anything to wait for.
        """
        waited = not self._recovering.is_set()
        await self._recovering.wait()
        return await self._recovery.wait(model) or waited

    async def _recover(self) -> None:
        """Recovers what dead processes left, and looks for more of it repeatedly."""
        try:
            if self.resume:
                async with asyncio.TaskGroup() as tasks:
                    await self._resume_repeatedly(tasks)
            else:
                await self._interrupt_once()
        finally:
            self._set_recovered()

    async def _interrupt_once(self) -> None:
        done = await self._interrupt_orphans()
        self._set_recovered()
        while not done:
            await asyncio.sleep(RECOVERY_INTERVAL_S)
            if self.models.card().state in (ModelState.READY, ModelState.AVAILABLE) and not self.turns.closing:
                done = await self._interrupt_orphans()

    async def _interrupt_orphans(self) -> bool:
        """Whether it succeeded. A model that can't be loaded is reported by those that wait for it, not here."""
        try:
            await self.models.ready()  # its format reads the tokens
        except PalaverError:
            return False
        return await self._try(self._mark_interrupted())

    async def _mark_interrupted(self) -> None:
        await self._recovery.interrupt(self.models)
        await self.loop.recover(False)

    async def _resume_repeatedly(self, tasks: asyncio.TaskGroup) -> None:
        """No model waits for another one: neither for its load, nor because it can't be loaded."""
        rounds: asyncio.Task[bool] | None = None
        first = True
        while True:
            if self.models.card().state is not ModelState.NONE and not self.turns.closing:
                await self._try(self._recovery.resume(self.models, tasks))
                if rounds is None or rounds.done():
                    rounds = tasks.create_task(self._try(self.loop.recover(True)))
            self._recovering.set()
            if first:
                tasks.create_task(self._finish_first(rounds))
                first = False
            await asyncio.sleep(RECOVERY_INTERVAL_S)

    async def _finish_first(self, rounds: asyncio.Task[bool] | None) -> None:
        await self._recovery.wait()
        if rounds is not None:
            await asyncio.wait([rounds])
        with suppress(PalaverError):  # replies of other models are continued without it
            await self.models.ready()
        if self.should_continue is not None:
            await self._continue_interrupted(self.should_continue)
        self._set_recovered()

    def _set_recovered(self) -> None:
        self._recovering.set()
        self.recovered.set()

    async def _continue_interrupted(self, should_continue: Callable[[StoredMessage], bool]) -> None:
        try:
            replies = await asyncio.to_thread(self.store.replies.list_interrupted)
        except PalaverError as error:
            _log.warning("interrupted replies were not continued: %s", error)
            return
        for reply in replies:
            if not should_continue(reply) or reply.reply is None:
                continue
            try:
                model = await self.models.for_reply(reply.reply.settings.model)
                if not is_same_tokenizer(model, reply):
                    continue
                conversation = await asyncio.to_thread(self.store.conversations.get, reply.conversation_id)
                await self.continuation.continue_reply(model, conversation.owner_id, reply)
            except Exception as error:
                _log.warning("an interrupted reply was not continued: %s", error)

    async def _try(self, recovery: Coroutine[None, None, None]) -> bool:
        """Whether it succeeded. If not, the replies stay as they are, and it is tried again later."""
        try:
            await recovery
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
