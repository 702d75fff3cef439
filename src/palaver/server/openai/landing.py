"""A chat request that names a conversation lands in it: what is new is kept there, and so is the reply.

A client may send the whole history, as OpenAI's clients do, or only what it says now. The history is looked for in
the conversation's tree from its root; what is not there begins a branch. One message alone is said where the
conversation was left. The turn belongs to the server: it goes on when the client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.errors import BadParameter, EngineError, NoMessages
from palaver.events import (
    AnswerDelta,
    Failed,
    Finished,
    ReadEvent,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
)
from palaver.messages import Message, Role, Text, Thinking, ToolCall
from palaver.server.bodies import Left
from palaver.server.errors import error_body, note
from palaver.server.openai.answering import begun, while_there
from palaver.server.openai.asking import Shown, check_model, offered, shown
from palaver.server.openai.conversing import conversing
from palaver.server.openai.fields import ChatRequest
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.speaking import Told, Totals
from palaver.server.openai.telling import DONE, Chunks, Heading, Whole, finish_reason, heading, stop_reason, usage
from palaver.server.openai.unknown import check_all
from palaver.server.openai.wishes import chat_parameters
from palaver.server.state import State
from palaver.server.streaming import EventStream
from palaver.store import Conflict, Conversation, Stored

HEADER = "x-conversation"
NEW = "new"
_ELSEWHERE = ("logprobs", "return_token_ids", "response_prefix", "continue_final_message", "token_healing")


def conversation_of(body: ChatRequest, headers: Mapping[str, str]) -> str | None:
    """The conversation that a request names."""
    inside = (body.metadata or {}).get("conversation")
    if inside is not None and not isinstance(inside, str):
        raise BadParameter("metadata.conversation", inside, "must be the id of a conversation, or new")
    return inside or headers.get(HEADER) or None


@dataclass(frozen=True, slots=True)
class Landed:
    conversation: str
    message: str
    reply: str

    def value(self) -> dict[str, Any]:
        about = {"conversation": self.conversation, "message": self.message, "reply": self.reply}
        return {"metadata": about}


async def landed(request: Request, body: ChatRequest, name: str, owner: str, state: State) -> Response:
    chat, model = state.service.chat(owner), state.service.models.current()
    with in_their_words():
        place, how = await _begin(chat, model, body, name, state, request.headers.get("idempotency-key"))
    telling = _Telling(how, heading(model), place)
    stream = _told(chat, place.reply)
    headers = {HEADER: place.conversation}
    try:
        if how.stream:
            first = await begun(request, stream)
            return EventStream(telling.chunks(stream, first), headers)
        return JSONResponse(await while_there(request, telling.whole(stream)), headers=headers)
    except Left:
        await stream.aclose()
        return Response(status_code=499)


async def _begin(
    chat: Chat, model: Model, body: ChatRequest, name: str, state: State, key: str | None
) -> tuple[Landed, Shown]:
    _check(body, model, state)
    tools, called = offered(body, state.settings)
    parameters = chat_parameters(body, state.settings, model.format.switches)
    parameters |= {"tools": tools} if tools else {}
    parameters |= {"must_call": called} if called else {}
    messages = conversing(body, state.settings.limits.messages).messages
    system = "\n\n".join(message.text for message in messages if message.role is Role.SYSTEM)
    said = [message for message in messages if message.role is not Role.SYSTEM]
    if not said:
        raise NoMessages
    if said[-1].role is Role.ASSISTANT:
        raise BadParameter("messages", "assistant", "the last message is a reply already: there is nothing to answer")
    conversation = await _conversation(chat, name, system)
    parent, fresh = await _placed(chat, conversation, said)
    if not fresh:
        assert parent is not None
        reply = await chat.reply(conversation.id, parent.id, parameters=parameters, key=key)
        return Landed(conversation.id, parent.id, reply.id), shown(body)
    at = parent.id if parent is not None else None
    for message in fresh[:-1]:
        at = (await chat.append(conversation.id, at, message)).id
    turn = await chat.say(conversation.id, at, fresh[-1], parameters=parameters, key=key)
    return Landed(conversation.id, turn.message.id, turn.reply.id), shown(body)


def _check(body: ChatRequest, model: Model, state: State) -> None:
    check_all(body)
    check_model(body.model, model, state.settings)
    if body.n not in (None, 1):
        raise BadParameter("n", body.n, "a conversation takes one reply at a time")
    for name in _ELSEWHERE:
        if getattr(body, name):
            raise BadParameter(name, getattr(body, name), "does not go with a conversation: see /api/turns")
    if body.reasoning_format == "none":
        raise BadParameter("reasoning_format", "none", "does not go with a conversation")


async def _conversation(chat: Chat, name: str, system: str) -> Conversation:
    if name == NEW:
        return await chat.create(system=system)
    found = await chat.conversation(name)
    if system and system != found.system:
        if found.head_id is not None:
            raise Conflict("The conversation has another system prompt: change it there, or leave it out here.")
        found = await chat.change(found.id, system=system)
    return found


async def _placed(
    chat: Chat, conversation: Conversation, said: Sequence[Message]
) -> tuple[Stored | None, Sequence[Message]]:
    """The message under which the first new one hangs, and those that are new."""
    nodes = await chat.nodes(conversation.id)
    if not nodes:
        return None, said
    if len(said) == 1:
        leaf = conversation.head_id or await chat.newest_leaf(conversation.id)
        return (await chat.message(leaf) if leaf else None), said
    children: dict[str | None, list[str]] = {}
    for node in nodes:
        children.setdefault(node.parent_id, []).append(node.id)
    at: Stored | None = None
    for place, message in enumerate(said):
        found = await _child(chat, children.get(at.id if at else None, ()), message)
        if found is None:
            return at, said[place:]
        at = found
    return at, ()


async def _child(chat: Chat, ids: Sequence[str], message: Message) -> Stored | None:
    """The newest of them that says the same."""
    for id in reversed(ids):
        stored = await chat.message(id)
        if stored.role is message.role and _words(stored.parts) == _words(message.parts):
            return stored
    return None


def _words(parts: Sequence[Any]) -> list[Any]:
    """What is compared: thinking is not, because clients leave it out."""
    texts = "".join(part.text for part in parts if isinstance(part, Text))
    return [texts, *(part for part in parts if not isinstance(part, Text | Thinking | ToolCall)), *_calls(parts)]


def _calls(parts: Sequence[Any]) -> list[tuple[str, str]]:
    return [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


async def _told(chat: Chat, reply: str) -> AsyncGenerator[Told]:
    async with chat.events(reply) as entries:
        async for entry in entries:
            match entry.event:
                case Waiting() | Started():
                    yield Told(0)
                case Finished(tail=tail) as finished:
                    yield Told(0, tail, finished)
                case Failed(error):
                    raise EngineError(error)
                case Snapshot(message):
                    yield Told(0, tuple(_again(message)))
                case event:
                    yield Told(0, (event,))


def _again(message: Message) -> list[ReadEvent]:
    """All that was said, as if it came now."""
    events: list[ReadEvent] = []
    calls = 0
    for part in message.parts:
        match part:
            case Text(text):
                events.append(AnswerDelta(text))
            case Thinking(text):
                events.append(ThinkingDelta(text))
            case ToolCall(id, name, arguments):
                events += [ToolCallOpened(calls, id, name), ToolCallDelta(calls, arguments)]
                calls += 1
    return events


@dataclass
class _Telling:
    """One turn of a conversation in OpenAI's words."""

    shown: Shown
    heading: Heading
    place: Landed
    calls: int = 0

    async def chunks(self, stream: AsyncGenerator[Told], first: asyncio.Future[Told]) -> AsyncGenerator[bytes]:
        chunks = Chunks(self.heading, self.shown, self.place.value())
        last = Told(0)
        try:
            yield chunks.opening(0)
            last = await first
            while True:
                yield chunks.of(last, self._ending(last))
                last = await anext(stream)
        except StopAsyncIteration:
            if self.shown.usage:
                yield chunks.usage(_usage(last))
            yield DONE
        except Exception as error:
            note(error)
            yield b"data: " + error_body(error) + b"\n\n" + DONE
        finally:
            first.cancel()
            await stream.aclose()

    async def whole(self, stream: AsyncGenerator[Told]) -> dict[str, Any]:
        whole, last = Whole(), Told(0)
        ending: tuple[str, str | int | None] = ("stop", None)
        async with aclosing(stream):
            async for told in stream:
                whole.take(told)
                ending, last = self._ending(told) or ending, told
        value = {**self.heading.value("chat.completion"), "choices": [whole.value(0, self.shown, ending)]}
        return {**value, "usage": _usage(last), **self.place.value()}

    def _ending(self, told: Told) -> tuple[str, str | int | None] | None:
        self.calls += sum(isinstance(event, ToolCallOpened) for event in told.events)
        if told.finished is None:
            return None
        return finish_reason(told.finished, self.shown, self.calls), stop_reason(told.finished)


def _usage(last: Told) -> dict[str, Any]:
    counted = last.finished.usage if last.finished is not None else None
    if counted is None:
        return usage([Totals()])
    return usage([Totals(counted.prompt_tokens, counted.cached_tokens, counted.reply_tokens, counted.thinking_tokens)])
