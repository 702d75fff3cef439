"""Titles that the model writes for new conversations while it is idle.

A title is written after the first exchange, once no turn and no other reply runs, and is given up as soon as one
starts: it is then written later. It is a reply that is not stored. A title that the user chose is never replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from palaver.chat.interface import ConversationChange, ModelState
from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.errors import PalaverError
from palaver.formats.base import RenderOptions
from palaver.formats.facts import thinking_switch
from palaver.messages import Role, Text, user
from palaver.models.resolver import DEFAULT_MODEL
from palaver.store import ReplyStatus, StoredMessage
from palaver.store.titles import clean_title

if TYPE_CHECKING:
    from palaver.chat.service import Service
    from palaver.chat.turns import Turn

IDLE_SECONDS = 1.0
"""How long nothing runs before a title is written, and how often that is looked at while one waits."""
MAX_WAITING = 100
"""Conversations that wait for a title. The oldest is given up first: it keeps the title from its first message."""
_MAX_TOKENS = 40
_MAX_CHARACTERS = 80
_MAX_EXCERPT = 1000
PROMPT = (
    "Write a title for the conversation below: at most six words, in the language of the conversation, without "
    "quotation marks. Answer with the title alone.\n\nMessage: {message}\n\nReply: {reply}"
)
_log = logging.getLogger(__name__)


class TitleWriter:
    """Entering starts its task, leaving ends it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting: OrderedDict[str, Turn] = OrderedDict()
        """Ended turns by the id of their conversation."""
        self._wanted, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether replies run that are no turns, such as those of stateless APIs."""

    async def __aenter__(self) -> TitleWriter:
        self._service.turns.on_end = self._turn_ended
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def settled(self) -> None:
        """Waits until no title waits or is being written."""
        await self._idle.wait()

    def _turn_ended(self, turn: Turn) -> None:
        self._waiting.setdefault(turn.reply.conversation_id, turn)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        self._wanted.set()
        self._idle.clear()

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(IDLE_SECONDS)
            if self._is_busy():
                continue
            conversation_id, turn = self._waiting.popitem(last=False)
            try:
                if not await self._write(turn):
                    self._waiting.setdefault(conversation_id, turn)
            except PalaverError as error:
                _log.info("no title was written: %s", error)
            except Exception:
                _log.exception("no title was written")
            if not self._waiting:
                self._wanted.clear()
                self._idle.set()

    def _is_busy(self) -> bool:
        return bool(self._service.turns.running) or self.is_busy()

    async def _write(self, turn: Turn) -> bool:
        """Returns False if it gave way to a reply."""
        store = self._service.store
        reply = await asyncio.to_thread(store.messages.get, turn.id)
        if reply.reply is None or reply.reply.status is not ReplyStatus.DONE or not reply.text.strip():
            return True
        path = await asyncio.to_thread(store.messages.path, reply.id)
        conversation = await asyncio.to_thread(store.conversations.get, reply.conversation_id)
        if conversation.title_given or [message.role for message in path] != [Role.USER, Role.ASSISTANT]:
            return True
        name = reply.reply.settings.model
        if name.startswith(DEFAULT_MODEL) or self._service.models.card(name).state is not ModelState.READY:
            return True  # the embedded models are too small, and no model is loaded for a title
        title = await self._generate(await self._service.models.get(name), path, turn.owner)
        if title is None:
            return False
        if title:
            renamed = await asyncio.to_thread(store.conversations.rename, conversation.id, title, False)
            if renamed.title == title:
                self._service.changes.publish(turn.owner, ConversationChange(conversation.id, "changed"))
        return True

    async def _generate(self, model: Model, path: tuple[StoredMessage, ...], owner: str) -> str | None:
        """The title; empty if the model wrote none, None if it was interrupted."""
        message, reply = (_first_text(one)[:_MAX_EXCERPT] for one in path)
        defaults = model.engine.info.defaults
        sampling = replace(defaults, temperature=0.0, max_tokens=_MAX_TOKENS, thinking_budget=0, seed=0)
        thinking = None if thinking_switch(model.format.switches) is None else False
        request = ReplyRequest(
            (user(PROMPT.format(message=message, reply=reply)),), sampling, options=RenderOptions(thinking), owner=owner
        )
        prompt = await asyncio.to_thread(model.prompt, request)
        async with model.stream_reply(request, prompt=prompt) as stream:
            async for _ in stream:
                if self._is_busy():
                    return None
            text = "".join(part.text for part in stream.reply().message.parts if isinstance(part, Text))
        return parse_title(text)


def _first_text(message: StoredMessage) -> str:
    """The text of a message without its attached files."""
    return next((part.text for part in message.parts if isinstance(part, Text) and part.text.strip()), "").strip()


def parse_title(text: str) -> str:
    """The title in a reply: its only line, without quotation marks and marks of Markdown. Empty if it is none."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if len(lines) != 1:
        return ""
    title = clean_title(lines[0].strip().removeprefix("Title:")).strip("#*_`\"'“”„«» ").rstrip(".")
    return title if 0 < len(title) <= _MAX_CHARACTERS else ""
