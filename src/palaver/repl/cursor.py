"""Where the terminal stands: a conversation and a message in it, or a conversation that is yet to be made.

Nothing is kept here that the chat knows: the branch, the system prompt and the parameters are asked for each time,
because somebody else may have changed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palaver.chat.interface import Chat
from palaver.chat.parameters import check_parameters, merge_parameters
from palaver.messages import Role
from palaver.store import Conversation, Cursor, NotFound, ReplyStatus, StoredMessage


@dataclass(frozen=True, slots=True)
class ConversationDraft:
    """What a conversation begins with. It is made with its first message, so that empty ones are not left about."""

    system: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class ConversationCursor:
    def __init__(self, chat: Chat, client: str, draft: ConversationDraft) -> None:
        self._chat = chat
        self._client = client
        self._draft = draft
        self.id: str | None = None
        """The conversation's."""

    async def conversation(self) -> Conversation | None:
        return None if self.id is None else await self._chat.conversation(self.id)

    async def made(self) -> Conversation:
        """The conversation, made now where there was none."""
        found = await self.conversation()
        if found is None:
            found = await self._chat.create(system=self._draft.system, parameters=self._draft.parameters)
            self.id = found.id
            await self._chat.move(found.id, self._client, None)  # undo leads back to here
        return found

    async def open(self, id: str) -> None:
        """Goes to where this client was, or to where somebody went on since then; an undo is respected."""
        conversation = await self._chat.conversation(id)
        cursor = await self._chat.cursor(id, self._client)
        at = cursor.message_id
        if not cursor.can_redo and conversation.head_id is not None:
            at = conversation.head_id
        await self._chat.move(id, self._client, at)
        self.id = id

    async def leave(self) -> None:
        """To a new conversation, with the system prompt and the parameters of this one."""
        self._draft = await self.begins_with()
        self.id = None

    async def begins_with(self) -> ConversationDraft:
        found = await self.conversation()
        return self._draft if found is None else ConversationDraft(found.system, found.parameters)

    # the branch

    async def cursor(self) -> Cursor:
        return Cursor(None, False, False) if self.id is None else await self._chat.cursor(self.id, self._client)

    async def path(self) -> tuple[StoredMessage, ...]:
        at = (await self.cursor()).message_id
        return () if at is None else await self._chat.path(at)

    async def last(self, role: Role) -> StoredMessage | None:
        return next((stored for stored in reversed(await self.path()) if stored.role is role), None)

    async def move(self, to: str | None) -> None:
        assert self.id is not None
        await self._chat.move(self.id, self._client, to)

    async def undo(self) -> None:
        assert self.id is not None
        await self._chat.undo(self.id, self._client)

    async def redo(self) -> None:
        assert self.id is not None
        await self._chat.redo(self.id, self._client)

    async def running(self) -> StoredMessage | None:
        """The reply at the end of the branch, where it is still being written."""
        path = await self.path()
        last = path[-1] if path else None
        return last if last and last.reply and last.reply.status is ReplyStatus.RUNNING else None

    # what is set

    async def set(self, **parameters: Any) -> None:
        """Sets parameters, for the turns to come; None takes one back to the model's default."""
        draft = await self.begins_with()
        whole = check_parameters(merge_parameters(draft.parameters, parameters))
        if self.id is None:
            self._draft = ConversationDraft(draft.system, whole)
        else:
            await self._chat.change(self.id, parameters=whole)

    async def replace(self, parameters: Mapping[str, Any]) -> None:
        """Sets exactly these."""
        draft = await self.begins_with()
        await self.set(**{**dict.fromkeys(draft.parameters), **parameters})

    async def set_system(self, system: str) -> None:
        if self.id is None:
            self._draft = ConversationDraft(system, self._draft.parameters)
        else:
            await self._chat.change(self.id, system=system)


async def find_conversation(chat: Chat, wanted: str) -> Conversation:
    """The conversation with that id, or the only one whose id begins so."""
    try:
        return await chat.conversation(wanted)
    except NotFound:
        near = [one for one in await list_conversations(chat) if one.id.startswith(wanted)]
        if len(near) != 1 or not wanted:
            raise
        return near[0]


async def list_conversations(chat: Chat, most: int = 1000) -> list[Conversation]:
    """The newest conversations first."""
    page = 200
    whole: list[Conversation] = []
    while len(whole) < most:
        more = await chat.conversations(limit=page, before=whole[-1].id if whole else None)
        whole += more
        if len(more) < page:
            break
    return whole
