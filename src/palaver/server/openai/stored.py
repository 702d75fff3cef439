"""Chat requests that name a conversation: the new messages and the reply are stored there.

A client may send the whole history, as OpenAI's clients do, or only its new message. The history is matched with the
conversation's tree from the root; messages that do not match start a branch. A single message is appended at the
head. The turn belongs to the server: it continues when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from palaver.chat.continuation import is_same_tokenizer
from palaver.chat.interface import Chat, ServerChat
from palaver.chat.model import Model, draw_seed
from palaver.chat.reply_request import PartialReply
from palaver.errors import BadParameter, NoMessages
from palaver.messages import MediaPart, Message, Role, Text, Thinking, ToolCall
from palaver.server.metrics import Metrics
from palaver.server.openai.audio import voice_output
from palaver.server.openai.request import (
    CONVERSATION_HEADER,
    ChatCall,
    OutputOptions,
    api_field_names,
    check_nested_fields,
    choice_count,
    ignored_header,
    ignored_request_fields,
    output_options,
    parse_history,
    request_parameters,
)
from palaver.server.openai.schemas import ChatRequest
from palaver.server.openai.streaming import ChatEncoder, CompletionStream, respond
from palaver.server.state import ServerState, canonical_arguments
from palaver.store import Blob, Conflict, Conversation, ReplyStatus, StoredMessage

NEW = "new"
_NOT_RESUMABLE = (ReplyStatus.DONE, ReplyStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The ids of the conversation, the last message and the replies of one request."""

    conversation: str
    message: str | None
    """None where the reply answers the system prompt alone."""
    replies: tuple[str, ...]
    """One for each choice."""

    @property
    def reply(self) -> str:
        return self.replies[0]

    def value(self) -> dict[str, Any]:
        about: dict[str, Any] = {"conversation": self.conversation, "message": self.message, "reply": self.reply}
        return {"metadata": {**about, "replies": list(self.replies)} if len(self.replies) > 1 else about}


async def answer_in_conversation(
    request: Request, body: ChatRequest, name: str, owner: str, state: ServerState
) -> Response:
    chat = state.service.chat(owner)
    model = await conversation_model(chat, name, body.model, state)
    key, output = request.headers.get("idempotency-key"), output_options(body)
    with api_field_names():
        check_nested_fields(body)
        attachments = state.attachments(model)
        history = await asyncio.to_thread(parse_history, body, state.settings.limits.messages, attachments)
        output, add_voice = await voice_output(output, owner, state)
        partial = None
        if history.partial is not None:
            partial = PartialReply(history.partial, history.partial_ids or ())
        parameters, reuse = choice_parameters(body, model, state), body.continue_final_message in (None, True)
        stored = await start_replies(chat, model, parameters, history.messages, name, key, partial, reuse)
        raw = body.reasoning_format == "none"
        completion = await stored_choices(chat, model, stored, output, raw, history.partial)
    deltas = add_voice(completion.deltas())
    ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
    headers = {CONVERSATION_HEADER: stored.conversation, **ignored}
    return await respond(request, completion, deltas, ChatEncoder(completion, stored.value()), headers)


async def conversation_model(chat: Chat, conversation: str, name: str | None, state: ServerState) -> Model:
    """The model of a turn: the one that the request names, or that of its conversation."""
    return await state.model(await conversation_model_name(chat, conversation, name))


async def conversation_model_name(chat: Chat, conversation: str, name: str | None) -> str | None:
    if name or conversation == NEW:
        return name
    return (await chat.conversation(conversation)).parameters.get("model")


async def stored_choices(
    chat: ServerChat,
    model: Model,
    stored: StoredRequest,
    output: OutputOptions,
    raw: bool = False,
    partial: Message | None = None,
) -> CompletionStream:
    """The stored replies as the choices of a completion. Metrics of turns are counted elsewhere."""
    reply_streams = [await chat.reply_stream(reply, raw=raw) for reply in stored.replies]
    call = ChatCall(model, reply_streams[0].request, len(reply_streams), output, partial)
    return CompletionStream(call, reply_streams, Metrics())


async def start_replies(
    chat: ServerChat,
    model: Model,
    parameters: Sequence[dict[str, Any]],
    messages: Sequence[Message],
    name: str,
    key: str | None,
    partial: PartialReply | None = None,
    reuse_stored: bool = True,
) -> StoredRequest:
    """Stores the new messages and starts the replies: one for each of the `parameters`. A new conversation is created
    once the request is known to be valid.

    `partial` is a reply to continue as the client sent it. Each reply is a new message beside it: nothing is
    overwritten. `reuse_stored`: the token ids of a stored reply with the same text may be used.
    """
    system = "\n\n".join(message.text for message in messages if message.role is Role.SYSTEM)
    turns = [message for message in messages if message.role is not Role.SYSTEM]
    if not messages:
        raise NoMessages
    if turns and turns[-1].role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    conversation = None if name == NEW else await _conversation(chat, name, system)
    parent: StoredMessage | None = None
    new: Sequence[Message] = turns
    if conversation is not None:
        parent, new = await _match_history(chat, conversation, turns, continued=partial is not None)
    if conversation is not None and partial is not None and reuse_stored and parent is not None and not new:
        stored = await _stored_reply(chat, model, conversation, parent, partial)
        if stored is not None and stored.reply is not None:
            parameters = [{"seed": stored.reply.settings.sampling.seed, **one} for one in parameters]
            if not partial.token_ids:
                ids = tuple(token.token_id for token in await chat.tokens(stored.id))
                partial = replace(partial, token_ids=ids, is_stored=True)
    at = parent.id if parent is not None else None
    started = await chat.start_replies(conversation, at, new, parameters, system=system, partial=partial, key=key)
    answered = started.messages[-1].id if started.messages else at
    return StoredRequest(started.conversation_id, answered, tuple(reply.id for reply in started.replies))


async def _stored_reply(
    chat: Chat, model: Model, conversation: Conversation, parent: StoredMessage, partial: PartialReply
) -> StoredMessage | None:
    """The unfinished reply in the conversation with the same content."""
    parts = partial.message.parts
    for node in reversed([node for node in await chat.nodes(conversation.id) if node.parent_id == parent.id]):
        stored = await chat.message(node.id)
        unfinished = stored.reply is not None and stored.reply.status not in _NOT_RESUMABLE
        same = _content(stored.parts) == _content(parts) and _thinking(stored.parts) == _thinking(parts)
        if unfinished and same and is_same_tokenizer(model, stored):
            return stored
    return None


def choice_parameters(body: ChatRequest, model: Model, state: ServerState) -> list[dict[str, Any]]:
    """The parameters of each choice. The first choice is started last, so that it becomes the head."""
    parameters = {**request_parameters(body, state.settings, model.format), "model": model.name}
    count = choice_count(body.n, state.settings)
    if count == 1:
        return [parameters]
    seed = parameters.get("seed", draw_seed())
    return [{**parameters, "seed": seed, "choice": choice} for choice in range(count)]


async def _conversation(chat: Chat, name: str, system: str) -> Conversation:
    found = await chat.conversation(name)
    if system and system != found.system:
        if found.head_id is not None:
            raise Conflict("The conversation has another system prompt: change it there, or leave it out here.")
        found = await chat.update_conversation(found.id, system=system)
    return found


async def _match_history(
    chat: Chat, conversation: Conversation, turns: Sequence[Message], continued: bool = False
) -> tuple[StoredMessage | None, Sequence[Message]]:
    """The stored message that the first new one follows, and the new ones."""
    nodes = await chat.nodes(conversation.id)
    if not nodes:
        return None, turns
    if len(turns) == 1:
        leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
        last = await chat.message(leaf) if leaf else None
        if not continued:
            return last, turns
        if (question := await _last_question(chat, last, turns[0])) is not None:
            return question, ()
    children: dict[str | None, list[str]] = {}
    for node in nodes:
        children.setdefault(node.parent_id, []).append(node.id)
    at: StoredMessage | None = None
    for index, message in enumerate(turns):
        child = await _matching_child(chat, children.get(at.id if at else None, ()), message)
        if child is None:
            return at, turns[index:]
        at = child
    return at, ()


async def _last_question(chat: Chat, last: StoredMessage | None, message: Message) -> StoredMessage | None:
    """The last message, or the one that it answers, if it equals `message`."""
    if last is not None and last.role is Role.ASSISTANT and last.parent_id is not None:
        last = await chat.message(last.parent_id)
    same = last is not None and last.role is message.role and _content(last.parts) == _content(message.parts)
    return last if same else None


async def _matching_child(chat: Chat, ids: Sequence[str], message: Message) -> StoredMessage | None:
    """The newest of these messages with the same content."""
    content = _content(message.parts) if ids else []
    for id in reversed(ids):
        stored = await chat.message(id)
        if stored.role is message.role and _content(stored.parts) == content:
            return stored
    return None


def _content(parts: Sequence[Any]) -> list[Any]:
    """What messages are compared by. Thinking does not count, because clients leave it out."""
    texts = "".join(part.text for part in parts if isinstance(part, Text))
    others = (part for part in parts if not isinstance(part, Text | Thinking | ToolCall))
    return [texts, *(part.digest if isinstance(part, Blob | MediaPart) else part for part in others), *_calls(parts)]


def _calls(parts: Sequence[Any]) -> list[tuple[str, str]]:
    return [(part.name, canonical_arguments(part.arguments)) for part in parts if isinstance(part, ToolCall)]


def _thinking(parts: Sequence[Any]) -> str:
    """Without trailing white space, which is not sent where a reply was cut."""
    return "".join(part.text for part in parts if isinstance(part, Thinking)).rstrip()
