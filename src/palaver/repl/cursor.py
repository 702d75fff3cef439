"""The terminal's position: a conversation and a message in it, or a new conversation that is not stored yet.

The branch, the system prompt and the parameters are read from the chat each time and never cached here, because
another client may change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.parameters import check_parameters, merge_parameters
from palaver.messages import Role
from palaver.store import Conversation, Cursor, NotFound, ReplyStatus, StoredMessage


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """The system prompt and the parameters of a conversation. A new conversation is stored with its first message."""

    system: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class ConversationCursor:
    def __init__(self, chat: Chat, client: str, settings: ConversationSettings) -> None:
        self._chat = chat
        self._client = client
        self._new_settings = settings
        self.conversation_id: str | None = None
        """None for a new conversation."""

    async def conversation(self) -> Conversation | None:
        return None if self.conversation_id is None else await self._chat.conversation(self.conversation_id)

    async def ensure_conversation(self) -> Conversation:
        """The current conversation, created if it is new."""
        found = await self.conversation()
        if found is None:
            found = await self._chat.create_conversation(
                system=self._new_settings.system, parameters=self._new_settings.parameters
            )
            self.conversation_id = found.id
            await self._chat.move_cursor(found.id, self._client, None)  # the first entry of the undo history
        return found

    async def open(self, id: str) -> None:
        """Moves to the conversation's head, or to this client's own position if it has undone moves."""
        conversation = await self._chat.conversation(id)
        cursor = await self._chat.cursor(id, self._client)
        at = cursor.message_id
        if not cursor.can_redo and conversation.head_id is not None:
            at = conversation.head_id
        await self._chat.move_cursor(id, self._client, at)
        self.conversation_id = id

    async def start_new(self) -> None:
        """Starts a new conversation with the system prompt and the parameters of this one, even if it was deleted."""
        try:
            self._new_settings = await self.settings()
        except NotFound:
            deleted = await self._chat.conversations(limit=200, deleted=True)
            found = next((one for one in deleted if one.id == self.conversation_id), None)
            if found is not None:
                self._new_settings = ConversationSettings(found.system, found.parameters)
        self.conversation_id = None

    async def is_deleted(self) -> bool:
        """Whether another client deleted the current conversation."""
        try:
            await self.conversation()
        except NotFound:
            return True
        return False

    async def discard_empty(self) -> None:
        """Deletes the current conversation if it has no messages. Its settings stay for the next message."""
        assert self.conversation_id is not None
        if not await self._chat.nodes(self.conversation_id):
            id = self.conversation_id
            await self.start_new()
            await self._chat.delete_conversation(id)

    async def settings(self) -> ConversationSettings:
        found = await self.conversation()
        return self._new_settings if found is None else ConversationSettings(found.system, found.parameters)

    # the branch

    async def position(self) -> Cursor:
        return (
            Cursor(None, False, False)
            if self.conversation_id is None
            else await self._chat.cursor(self.conversation_id, self._client)
        )

    async def path(self) -> tuple[StoredMessage, ...]:
        at = (await self.position()).message_id
        return () if at is None else await self._chat.path(at)

    async def last_message(self, role: Role) -> StoredMessage | None:
        return next((stored for stored in reversed(await self.path()) if stored.role is role), None)

    async def move(self, message_id: str | None) -> None:
        assert self.conversation_id is not None
        await self._chat.move_cursor(self.conversation_id, self._client, message_id)

    async def undo(self) -> None:
        assert self.conversation_id is not None
        await self._chat.undo(self.conversation_id, self._client)

    async def redo(self) -> None:
        assert self.conversation_id is not None
        await self._chat.redo(self.conversation_id, self._client)

    async def running_reply(self) -> StoredMessage | None:
        """The reply at the end of the branch, if it is still running."""
        path = await self.path()
        last = path[-1] if path else None
        return last if last and last.reply and last.reply.status is ReplyStatus.RUNNING else None

    # settings

    async def set_parameters(self, **parameters: Any) -> None:
        """Sets parameters for the following turns; None resets one to the model's default."""
        settings = await self.settings()
        checked = check_parameters(merge_parameters(settings.parameters, parameters))
        if self.conversation_id is None:
            self._new_settings = ConversationSettings(settings.system, checked)
        else:
            await self._chat.update_conversation(self.conversation_id, parameters=checked)

    async def replace_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Replaces all parameters."""
        settings = await self.settings()
        await self.set_parameters(**{**dict.fromkeys(settings.parameters), **parameters})

    async def set_system(self, system: str) -> None:
        if self.conversation_id is None:
            self._new_settings = ConversationSettings(system, self._new_settings.parameters)
        else:
            await self._chat.update_conversation(self.conversation_id, system=system)


async def find_conversation(chat: Chat, id: str) -> Conversation:
    """The conversation with that id, or the only one whose id starts with it."""
    try:
        return await chat.conversation(id)
    except NotFound:
        matches = [one for one in await list_conversations(chat) if one.id.startswith(id)]
        if len(matches) != 1 or not id:
            raise
        return matches[0]


async def list_conversations(chat: Chat, limit: int = 1000) -> list[Conversation]:
    """The newest conversations first."""
    page_size = 200
    conversations: list[Conversation] = []
    while len(conversations) < limit:
        page = await chat.conversations(limit=page_size, before=conversations[-1].id if conversations else None)
        conversations += page
        if len(page) < page_size:
            break
    return conversations
