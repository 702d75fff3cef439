"""Where a response is stored: ids, the request's record, and the branch of a conversation that a request continues.

A response is a reply of a conversation, and its id contains the id of the reply's message. Nothing but the conversation
is stored, and every reply is a response, also those that other APIs created."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palaver.chat.interface import Chat, ServerChat
from palaver.messages import Message, Role
from palaver.server.errors import NoPreviousResponse
from palaver.server.responses.schemas import ConversationReference, ResponseRequest
from palaver.server.state import ResponseIndex
from palaver.store import Conflict, Conversation, NotFound, ReplyStatus, StoredMessage
from palaver.store.tool_rounds import ENDED, UNDECIDED, RoundState, ToolRound

_RESPONSE_ID = re.compile(r"resp_([0-9a-z]{1,64})(_calls)?")
_NOTE_KEY = "response"


class ApprovalRecord(BaseModel):
    """How a response decided about the tool calls of a reply. It begins with these calls and has an id of its own."""

    answers: dict[int, bool] = Field(default_factory=dict)
    """By the position of the call."""
    interrupted: list[int] = Field(default_factory=list)
    """Calls that had begun before."""
    record: dict[str, Any] = Field(default_factory=dict)
    """The `ResponseRecord` of its request."""


class ResponseRecord(BaseModel):
    """Fields of the request that are stored with the reply, beyond the reply's own settings."""

    model_config = ConfigDict(extra="ignore")

    asked: bool = False
    """Whether the reply was created by the Responses API."""
    background: bool = False
    metadata: dict[str, str] = Field(default_factory=dict)
    instructions: str | None = None
    developer: str = ""
    """The text of the input's system messages at the beginning of a conversation."""
    previous: str | None = None
    inputs: int = 0
    """How many messages of the branch, before the reply, came with the request."""
    tool_choice: Any = "auto"
    parallel: bool = True
    strict: list[str] = Field(default_factory=list)
    """The names of the tools that were sent with `strict`."""
    mcp: list[dict[str, Any]] = Field(default_factory=list)
    """The tools of the type mcp without their secrets, each with the `name` of its server."""
    approval: ApprovalRecord | None = None
    """How the calls of this reply were decided about."""
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    effort: str | None = None
    summary: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = Field(default_factory=list)
    top_logprobs: int = 0
    user: str | None = None
    cancelled: bool = False
    """Whether it was cancelled while it was interrupted: it is not resumed any more."""
    deleted: bool = False
    of: str = ""
    """The id of the reply that was cancelled or deleted. A fork copies this record, but is neither."""

    def note(self) -> dict[str, Any]:
        return {_NOTE_KEY: self.model_dump(exclude_defaults=True)}


def read_record(reply: StoredMessage) -> ResponseRecord:
    """The record of a reply; the defaults if another API created it or its note can't be read."""
    note = reply.reply.settings.options.get("note") if reply.reply is not None else None
    try:
        record = ResponseRecord.model_validate(
            note.get(_NOTE_KEY) if isinstance(note, dict) and _NOTE_KEY in note else {}
        )
    except ValidationError:
        return ResponseRecord()
    return record if record.of == reply.id else record.model_copy(update={"cancelled": False, "deleted": False})


def is_background(reply: StoredMessage) -> bool:
    """Whether it is a background response that was neither cancelled nor deleted."""
    record = read_record(reply)
    return record.asked and record.background and not record.cancelled and not record.deleted


def response_id(reply: str) -> str:
    return f"resp_{reply}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response: a reply with those that follow its tool calls; or, `after_approval`, these calls and what follows."""

    reply: StoredMessage
    after_approval: bool = False

    @property
    def id(self) -> str:
        return response_id(self.reply.id) + ("_calls" if self.after_approval else "")

    @property
    def record(self) -> ResponseRecord:
        record = read_record(self.reply)
        if not self.after_approval or record.approval is None:
            return record
        marks = {"cancelled": record.cancelled, "deleted": record.deleted}
        own = ResponseRecord.model_validate(record.approval.record)
        return own.model_copy(update={**marks, "approval": record.approval, "mcp": own.mcp or record.mcp})


async def find_response(chat: Chat, id: str) -> StoredResponse:
    """The response with this id. Raises NotFound if it does not exist, was deleted or has another owner."""
    match = _RESPONSE_ID.fullmatch(id)
    if match is None:
        raise NotFound("response", id[:200])
    try:
        stored = await chat.message(match[1])
    except NotFound:
        raise NotFound("response", id) from None
    found = StoredResponse(stored, match[2] is not None)
    record = read_record(stored)
    if stored.reply is None or record.deleted or (found.after_approval and record.approval is None):
        raise NotFound("response", id)
    return found


async def last_reply(chat: Chat, reply: StoredMessage) -> StoredMessage:
    """The last of the replies that followed each other by tool calls."""
    while (round := await chat.tool_round(reply.id)) is not None and round.next_id is not None:
        reply = await chat.message(round.next_id)
    return reply


async def _last_message(chat: Chat, reply: StoredMessage) -> str:
    """The last message of a response: its last reply, or the results of the calls that ran here."""
    reply = await last_reply(chat, reply)
    round = await chat.tool_round(reply.id)
    if round is not None and round.state is RoundState.OPEN and not waits_for_approval(round):
        raise Conflict("The tool calls of the response before this one are still running: wait, or cancel it first.")
    if round is None or round.state is not RoundState.DONE:
        return reply.id
    results = {node.parent_id: node.id for node in await chat.nodes(reply.conversation_id) if node.role is Role.TOOL}
    leaf = reply.id
    for _ in round.calls:
        leaf = results.get(leaf, leaf)
    return leaf


def waits_for_approval(round: ToolRound) -> bool:
    """Whether calls wait for the user, and nothing else happens."""
    states = {call.state for call in round.calls}
    return bool(states & {*UNDECIDED}) and states <= {*UNDECIDED, *ENDED}


@dataclass(frozen=True, slots=True)
class ResponseTarget:
    """Where a response goes: the conversation, its branch, and the messages to append."""

    conversation: Conversation | None
    """None: a new one."""
    path: tuple[StoredMessage, ...]
    """The branch that the messages are appended to."""
    messages: tuple[Message, ...]
    system: str
    """The system prompt of this response."""
    record: ResponseRecord


async def resolve_target(
    chat: Chat,
    body: ResponseRequest,
    messages: Sequence[Message],
    record: ResponseRecord,
    index: ResponseIndex,
    owner: str,
) -> ResponseTarget:
    if body.previous_response_id is not None:
        return await _after_response(chat, body.previous_response_id, messages, record)
    if body.conversation is not None:
        return await _in_conversation(chat, body.conversation, messages, record)
    developer, inputs = split_system(messages)
    record = record.model_copy(update={"developer": developer, "inputs": len(inputs)})
    system = _join(record.instructions or "", developer)
    path = await _stored_branch(chat, index.find(owner, inputs))
    if not path:
        return ResponseTarget(None, (), inputs, system, record)
    return ResponseTarget(await chat.conversation(path[-1].conversation_id), path, inputs[len(path) :], system, record)


async def start_response(
    chat: ServerChat, target: ResponseTarget, parameters: Mapping[str, Any], key: str | None
) -> StoredMessage:
    """Stores the messages and starts the reply. An invalid request is refused before anything is written."""
    parameters = {**parameters, "system": target.system, "note": target.record.note()}
    parent = target.path[-1].id if target.path else None
    started = await chat.start_replies(
        target.conversation, parent, target.messages, (parameters,), system=target.system, key=key
    )
    return started.replies[0]


async def _after_response(chat: Chat, id: str, messages: Sequence[Message], record: ResponseRecord) -> ResponseTarget:
    try:
        reply = await last_reply(chat, (await find_response(chat, id)).reply)
    except NotFound:
        raise NoPreviousResponse(id) from None
    _check_ended(reply)
    conversation = await chat.conversation(reply.conversation_id)
    path = await chat.path(await _last_message(chat, reply))
    record = record.model_copy(update={"previous": id, "inputs": len(messages)})
    system = record.instructions if record.instructions is not None else _inherited_system(conversation, path)
    return ResponseTarget(conversation, path, tuple(messages), system, record)


async def _in_conversation(
    chat: Chat, name: str | ConversationReference, messages: Sequence[Message], record: ResponseRecord
) -> ResponseTarget:
    conversation = await chat.conversation(name if isinstance(name, str) else name.id)
    leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
    path = await chat.path(leaf) if leaf is not None else ()
    if path:
        _check_ended(path[-1])
    system = record.instructions if record.instructions is not None else conversation.system
    record = record.model_copy(update={"inputs": len(messages)})
    return ResponseTarget(conversation, path, tuple(messages), system, record)


async def _stored_branch(chat: Chat, replies: Iterable[tuple[str, int]]) -> tuple[StoredMessage, ...]:
    """The longest branch that the input repeats and that is still stored."""
    for reply, count in replies:
        with suppress(NotFound):
            path = await chat.path((await find_response(chat, response_id(reply))).reply.id)
            if len(path) == count:
                return path
    return ()


def _check_ended(reply: StoredMessage) -> None:
    if reply.reply is not None and reply.reply.status is ReplyStatus.RUNNING:
        raise Conflict("The response before this one is still running: wait for it, or cancel it first.")


def _inherited_system(conversation: Conversation, path: Sequence[StoredMessage]) -> str:
    """The system prompt without the instructions of the response that created it: they applied to it alone."""
    for record in map(read_record, path):
        if record.instructions and conversation.system == _join(record.instructions, record.developer):
            return record.developer
    return conversation.system


def _join(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def split_system(messages: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """The text of the leading system messages, and the messages after them."""
    first = next((n for n, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    return "\n\n".join(message.text for message in messages[:first]), tuple(messages[first:])
