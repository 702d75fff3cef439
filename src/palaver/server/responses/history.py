"""How a response's id names a turn, and what is kept of the request with the turn's reply.

A response is a reply of a conversation: its id holds the id of the reply's message, so that nothing but the
conversation has to be stored, and every reply, whichever door it came through, is a response too."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.parameters import check_parameters
from palaver.chat.service import Service
from palaver.chat.turns import NewTurn
from palaver.errors import NoMessages
from palaver.messages import Message, Role
from palaver.server.errors import NoPreviousResponse
from palaver.server.openai.reply_index import message_digests
from palaver.server.responses.items import split_system
from palaver.server.responses.schemas import ConversationReference, ResponseRequest
from palaver.store import Conflict, Conversation, NotFound, ReplyStatus, StoredMessage

_ID = re.compile(r"resp_([0-9a-z]{1,64})")
_NOTE = "response"


class ResponseRecord(BaseModel):
    """What a response tells of its request besides what the reply's own record has."""

    model_config = ConfigDict(extra="ignore")

    asked: bool = False
    """Whether the reply was asked for as a response; other doors' replies were not."""
    background: bool = False
    metadata: dict[str, str] = Field(default_factory=dict)
    instructions: str | None = None
    developer: str = ""
    """What the input's own system messages said at the beginning of a conversation."""
    previous: str | None = None
    inputs: int = 0
    """How many messages of the branch, up to the reply, came with the request."""
    tool_choice: Any = "auto"
    parallel: bool = True
    strict: list[str] = Field(default_factory=list)
    """The tools that were sent as strict ones."""
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    effort: str | None = None
    summary: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = Field(default_factory=list)
    top_logprobs: int = 0
    user: str | None = None
    cancelled: bool = False
    """Whether it was cancelled when it did not run: it was put aside, and does not go on any more."""
    deleted: bool = False
    of: str = ""
    """The reply that was cancelled or deleted: one that was made from it, with all that is kept of it, was not."""

    def note(self) -> dict[str, Any]:
        return {_NOTE: self.model_dump(exclude_defaults=True)}


def read_record(reply: StoredMessage) -> ResponseRecord:
    """Of a reply that was asked for elsewhere, or whose note is none of ours: the defaults."""
    note = reply.reply.settings.options.get("note") if reply.reply is not None else None
    try:
        known = ResponseRecord.model_validate(note.get(_NOTE) if isinstance(note, dict) and _NOTE in note else {})
    except ValidationError:
        return ResponseRecord()
    return known if known.of == reply.id else known.model_copy(update={"cancelled": False, "deleted": False})


def is_background(reply: StoredMessage) -> bool:
    """Whether it was asked for in the background, and nobody has cancelled or deleted it."""
    known = read_record(reply)
    return known.asked and known.background and not known.cancelled and not known.deleted


def response_id(reply: str) -> str:
    return f"resp_{reply}"


async def find_response(chat: Chat, id: str) -> StoredMessage:
    """The reply that a response's id names; NotFound where it is another's, was deleted or never was."""
    named = _ID.fullmatch(id)
    if named is None:
        raise NotFound("response", id[:200])
    try:
        stored = await chat.message(named[1])
    except NotFound:
        raise NotFound("response", id) from None
    if stored.reply is None or read_record(stored).deleted:
        raise NotFound("response", id)
    return stored


MOST = 50_000
"""Replies that are remembered; the one that was not asked for longest is forgotten first."""


class ResponseIndex:
    """Replies of stored responses by what they and all before them say."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._replies: OrderedDict[bytes, str] = OrderedDict()

    def keep(self, owner: str, branch: Sequence[Message], reply: str) -> None:
        """`branch` ends with the reply."""
        *_, key = message_digests(owner, branch)
        self._replies[key] = reply
        self._replies.move_to_end(key)
        while len(self._replies) > self._most:
            self._replies.popitem(last=False)

    def find(self, owner: str, messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
        """The replies among the messages that are known, the last first, and how many messages there are up to each."""
        keys = list(message_digests(owner, messages))
        for place in reversed(range(len(messages))):
            reply = self._replies.get(keys[place]) if messages[place].role is Role.ASSISTANT else None
            if reply is not None:
                self._replies.move_to_end(keys[place])
                yield reply, place + 1


@dataclass(frozen=True, slots=True)
class ResponsePlace:
    conversation: Conversation | None
    """None: one that is to be made."""
    path: tuple[StoredMessage, ...]
    """The branch that the messages hang on."""
    messages: tuple[Message, ...]
    system: str
    """The system prompt of this response."""
    known: ResponseRecord


async def place_response(
    chat: Chat,
    body: ResponseRequest,
    messages: Sequence[Message],
    known: ResponseRecord,
    branches: ResponseIndex,
    owner: str,
) -> ResponsePlace:
    if all(message.role is Role.SYSTEM for message in messages):
        raise NoMessages
    if body.previous_response_id is not None:
        return await _behind(chat, body.previous_response_id, messages, known)
    if body.conversation is not None:
        return await _left(chat, body.conversation, messages, known)
    developer, said = split_system(messages)
    known = known.model_copy(update={"developer": developer, "inputs": len(said)})
    system = _joined(known.instructions or "", developer)
    path = await _said_before(chat, branches.find(owner, said))
    if not path:
        return ResponsePlace(None, (), said, system, known)
    return ResponsePlace(await chat.conversation(path[-1].conversation_id), path, said[len(path) :], system, known)


async def begin_response(
    service: Service,
    chat: Chat,
    model: Model,
    owner: str,
    place: ResponsePlace,
    parameters: Mapping[str, Any],
    key: str | None,
) -> StoredMessage:
    """The messages, durably, and the reply to them. What can't be answered is refused before anything is written."""
    wanted = {**parameters, "system": place.system, "note": place.known.note()}
    home = place.conversation or _not_made(owner, place.system)
    asked = await asyncio.to_thread(
        service.requests.new, model, home, place.path, place.messages, check_parameters(wanted)
    )
    conversation = place.conversation or await chat.create(system=place.system, key=key)
    at = place.path[-1].id if place.path else None
    for number, message in enumerate(place.messages):
        at = (await chat.append(conversation.id, at, message, key=_key(key, str(number)))).id
    request = replace(asked.request, conversation=conversation.id)
    beginning = NewTurn(conversation.id, at, request, asked.settings, key=_key(key, "reply"), prompt=asked.prompt)
    return await service.turns.begin(model, beginning)


async def _behind(chat: Chat, id: str, messages: Sequence[Message], known: ResponseRecord) -> ResponsePlace:
    try:
        reply = await find_response(chat, id)
    except NotFound:
        raise NoPreviousResponse(id) from None
    _check_over(reply)
    conversation, path = await chat.conversation(reply.conversation_id), await chat.path(reply.id)
    known = known.model_copy(update={"previous": id, "inputs": len(messages)})
    system = known.instructions if known.instructions is not None else _carried(conversation, path)
    return ResponsePlace(conversation, path, tuple(messages), system, known)


async def _left(
    chat: Chat, name: str | ConversationReference, messages: Sequence[Message], known: ResponseRecord
) -> ResponsePlace:
    conversation = await chat.conversation(name if isinstance(name, str) else name.id)
    leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
    path = await chat.path(leaf) if leaf is not None else ()
    if path:
        _check_over(path[-1])
    system = known.instructions if known.instructions is not None else conversation.system
    known = known.model_copy(update={"inputs": len(messages)})
    return ResponsePlace(conversation, path, tuple(messages), system, known)


async def _said_before(chat: Chat, known: Iterable[tuple[str, int]]) -> tuple[StoredMessage, ...]:
    """The branch that the input repeats, as much of it as is still there."""
    for reply, count in known:
        with suppress(NotFound):
            path = await chat.path((await find_response(chat, response_id(reply))).id)
            if len(path) == count:
                return path
    return ()


def _check_over(reply: StoredMessage) -> None:
    if reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING:
        raise Conflict("The response before this one is still running: wait for it, or cancel it first.")


def _carried(conversation: Conversation, path: Sequence[StoredMessage]) -> str:
    """A response's instructions are its own: of a system prompt that they were a part of only the rest goes on."""
    for known in map(read_record, path):
        if known.instructions and conversation.system == _joined(known.instructions, known.developer):
            return known.developer
    return conversation.system


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _key(key: str | None, what: str) -> str | None:
    return None if key is None else f"{key} {what}"


def _not_made(owner: str, system: str) -> Conversation:
    """The conversation as it will be, to see whether its first message can be answered."""
    now = datetime.now(UTC)
    return Conversation("", owner, "", False, system, {}, (), None, now, now)
