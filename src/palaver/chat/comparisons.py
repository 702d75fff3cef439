"""Comparisons: one message to several models or settings, and the choice of one of the replies.

The replies are turns like all others: siblings under the same message, which can be stopped, continued and resumed
after a crash. A comparison only names them. In a blind one their order is random, and their names are hidden until the
choice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from palaver.chat.interface import Column, ConversationChange
from palaver.chat.parameters import check_parameters
from palaver.errors import BadParameter, EmptyMessage
from palaver.messages import Message
from palaver.store import Conflict
from palaver.store.comparisons import ComparedReply, Comparison, TallyRow
from palaver.store.records import MAX_NAME, check_name
from palaver.transcripts.preferences import PreferenceFile, write_preferences

if TYPE_CHECKING:
    from palaver.chat.local_chat import LocalChat
    from palaver.chat.turns import ChangeFeed
    from palaver.store import Store

MAX_COLUMNS = 8
CHANGE = "comparison"
"""What changes in a conversation when replies are compared or one is chosen."""
_SHOWN_TEXT = 24
"""The characters of a text, such as a system prompt, in the name of a column."""


class ReplyComparisons:
    """The comparisons of one user."""

    def __init__(self, chat: LocalChat, store: Store, changes: ChangeFeed, owner: str) -> None:
        self._chat = chat
        self._comparisons = store.comparisons
        self._store = store
        self._changes = changes
        self._owner = owner

    async def start(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message | None,
        columns: Sequence[Column],
        blind: bool,
        key: str | None,
    ) -> Comparison:
        """Stores the message, if there is one, and starts a reply for each column."""
        conversation = await self._chat.conversation(conversation_id)
        if (
            key is not None
            and (found := await asyncio.to_thread(self._comparisons.find, conversation_id, key)) is not None
        ):
            return hide_names(found)
        if message is None and parent is None:
            raise BadParameter("message", None, "must be given where there is no message to reply to")
        if message is not None and message.is_blank:
            raise EmptyMessage
        check_columns(columns)
        if blind:  # the order of the siblings must not tell either; the same key gives the same order
            columns = random.Random(key).sample(columns, len(columns))
        messages = () if message is None else (message,)
        choices = [column.parameters for column in columns]
        started = await self._chat.start_replies(conversation, parent, messages, choices, key=key)
        replies = []
        for column, reply in zip(columns, started.replies, strict=True):
            assert reply.reply is not None
            model = reply.reply.settings.model
            replies.append(ComparedReply(reply.id, column_name(column, model), model, dict(column.parameters)))
        parent_id = started.replies[0].parent_id
        assert parent_id is not None
        comparison = await asyncio.to_thread(self._comparisons.create, conversation_id, parent_id, replies, blind, key)
        return self._publish(comparison)

    async def get(self, id: str) -> Comparison:
        comparison = await asyncio.to_thread(self._comparisons.get, id)
        await self._chat.conversation(comparison.conversation_id)  # of this user
        return hide_names(comparison)

    async def list(self, conversation_id: str) -> tuple[Comparison, ...]:
        await self._chat.conversation(conversation_id)
        return tuple(map(hide_names, await asyncio.to_thread(self._comparisons.list, conversation_id)))

    async def choose(self, id: str, reply_id: str | None) -> Comparison:
        """The branch of the chosen reply becomes the head."""
        comparison = await self.get(id)
        comparison = await asyncio.to_thread(self._comparisons.decide, id, reply_id)
        if reply_id is not None:
            conversation = await self._chat.conversation(comparison.conversation_id)
            leaf = await self._chat.newest_leaf(conversation.id, reply_id)
            with suppress(Conflict):  # another client moved it: the head is a hint
                move_head = self._store.conversations.move_head
                await asyncio.to_thread(move_head, conversation.id, conversation.head_id, leaf)
        return self._publish(comparison)

    async def tally(self) -> tuple[TallyRow, ...]:
        return await asyncio.to_thread(self._comparisons.tally, self._owner)

    async def preferences(self, conversation_id: str | None) -> PreferenceFile:
        if conversation_id is not None:
            ids: tuple[str, ...] = ((await self._chat.conversation(conversation_id)).id,)
        else:
            ids = await asyncio.to_thread(self._store.conversations.ids, self._owner)
        return await asyncio.to_thread(write_preferences, self._store, ids)

    def _publish(self, comparison: Comparison) -> Comparison:
        change = ConversationChange(comparison.conversation_id, CHANGE, comparison.parent_id)
        self._changes.publish(self._owner, change)
        return hide_names(comparison)


def check_columns(columns: Sequence[Column]) -> None:
    """Raises BadParameter for the first column that is not valid."""
    if not 2 <= len(columns) <= MAX_COLUMNS:
        raise BadParameter("columns", len(columns), f"must be 2 to {MAX_COLUMNS}")
    for column in columns:
        check_parameters(column.parameters)
        if column.name:
            check_name("name", column.name)


def column_name(column: Column, model: str) -> str:
    """The name that was given, or the model and the settings that differ from those of the conversation."""
    if column.name:
        return column.name
    words = [model.rstrip("/").rpartition("/")[2] or model]
    words += [f"{name} {_value(value)}" for name, value in sorted(column.parameters.items()) if name != "model"]
    name = " · ".join(words)
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def hide_names(comparison: Comparison) -> Comparison:
    """The comparison without names, models and settings, if it is blind and the choice is open."""
    if not comparison.blind or comparison.decided_at is not None:
        return comparison
    hidden = tuple(ComparedReply(one.reply_id, "", "", {}) for one in comparison.replies)
    return replace(comparison, replies=hidden)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case Mapping() | list() | tuple():
            return "set"
        case _:
            text = " ".join("".join(one if one.isprintable() else " " for one in str(value)).split())
            return text if len(text) <= _SHOWN_TEXT else f"{text[: _SHOWN_TEXT - 1]}…"
