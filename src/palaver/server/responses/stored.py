"""Responses that are stored: asked for, gone back to, followed, cancelled, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.recovery import is_same_tokenizer
from palaver.chat.subscription import ended_event
from palaver.errors import EngineError, ModelError, PalaverError, RequestError, ShuttingDown
from palaver.events import Failed, Finished, ReadEvent, Started, Waiting
from palaver.messages import Role
from palaver.server.openai.disconnect import (
    FIRST_SECONDS,
    close_on_failure,
    close_stream,
    first_chunk,
    first_seconds,
    run_while_connected,
)
from palaver.server.openai.messages import parse_history
from palaver.server.openai.request import check_model, whole_parameters
from palaver.server.openai.sampling_params import api_field_names, ignored_header
from palaver.server.openai.schemas import ChatRequest
from palaver.server.request_body import ClientDisconnected
from palaver.server.responses.encoder import ResponseEnding
from palaver.server.responses.history import begin_response, find_response, place_response, read_record, response_id
from palaver.server.responses.items import chat_messages, check_answerable, message_items, resolve_references
from palaver.server.responses.request import THEIRS, ignored_of, to_chat_request, to_record
from palaver.server.responses.schemas import LOGPROBS, ResponseRequest
from palaver.server.responses.streaming import (
    ReplyParked,
    begin_tracked,
    complete_response,
    follow_response,
    replay_deltas,
    stored_encoder,
    stored_ending,
    stream_events,
)
from palaver.server.sse import EventStream
from palaver.server.state import ServerState
from palaver.store import ReplyStatus, StoredMessage

_KEY = "idempotency-key"


async def answer_stored(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    """Unless it runs in the background, the reply is stopped when its client leaves: what was said is kept."""
    chat, model = state.service.chat(owner), state.service.models.current()
    with api_field_names(THEIRS):
        reply = await _begun(chat, model, body, owner, state, request.headers.get(_KEY))
        ignored = ignored_header(ignored_of(body, state.settings, model.format))
    if body.background and not body.stream:
        return JSONResponse(stored_encoder(reply).response("queued"), headers=ignored)
    leave = _nothing if body.background else _stopping(state, reply)
    try:
        with api_field_names(THEIRS):
            await run_while_connected(request, _let_in(state, chat, reply))
        if body.stream:
            return EventStream(_pieces(state, chat, reply), ignored, on_leave=leave)
        value = await run_while_connected(request, _whole(state, chat, reply))
        _raise_engine_failure(state, reply)
        return JSONResponse(value, headers=ignored)
    except ClientDisconnected:
        leave()
        raise


async def read_response(state: ServerState, chat: Chat, id: str, include: Sequence[str] = ()) -> dict[str, Any]:
    """A response as it stands."""
    return await _as_it_stands(state, chat, await _awake(state, chat, await find_response(chat, id)), include)


async def stream_stored(
    request: Request, state: ServerState, chat: Chat, id: str, after: int, include: Sequence[str]
) -> Response:
    """Its events after that number, to the end."""
    reply = await _awake(state, chat, await find_response(chat, id))
    stream = _pieces(state, chat, reply, after, include)
    async with close_on_failure(stream):
        first = await first_chunk(request, stream)
    return EventStream(_with_first(first, stream))


async def cancel_response(state: ServerState, chat: Chat, id: str) -> dict[str, Any]:
    """Stops it where it runs, and says how it stands then. One that is over stays as it is."""
    reply = await find_response(chat, id)
    await _stopped(chat, reply)
    if reply.reply is not None and reply.reply.status is ReplyStatus.INTERRUPTED:
        await _mark(state, reply, cancelled=True)
    return await _as_it_stands(state, chat, await find_response(chat, id))


async def delete_response(state: ServerState, chat: Chat, id: str) -> None:
    """The response is gone. Its conversation goes with the last of its replies; until then others may hang on it."""
    reply = await find_response(chat, id)
    await _stopped(chat, reply)
    await _mark(state, reply, deleted=True)
    everything = await asyncio.to_thread(state.service.store.messages.everything, reply.conversation_id)
    if all(read_record(message).deleted for message in everything if message.role is Role.ASSISTANT and message.reply):
        await chat.delete(reply.conversation_id)


async def input_items(chat: Chat, id: str) -> list[dict[str, Any]]:
    """What came with the request, the oldest first."""
    reply = await find_response(chat, id)
    path = await chat.path(reply.parent_id) if reply.parent_id is not None else ()
    known = read_record(reply)
    came = path[-(known.inputs or 1) :]
    items = [item for message in came for item in message_items(message.id, message.role, message.parts)]
    if developer := known.developer:
        content = [{"type": "input_text", "text": developer}]
        about = {"id": f"dev_{reply.id}", "type": "message", "role": "system", "status": "completed"}
        items.insert(0, {**about, "content": content})
    return items


async def _stopped(chat: Chat, reply: StoredMessage) -> None:
    """Stops it where it runs, and waits for its end."""
    if reply.reply is None or reply.reply.status is not ReplyStatus.RUNNING:
        return
    await chat.stop(reply.id)
    async with chat.events(reply.id) as entries:
        async for _ in entries:
            pass


async def _mark(state: ServerState, reply: StoredMessage, **marks: bool) -> None:
    note = read_record(reply).model_copy(update={**marks, "of": reply.id}).note()
    await asyncio.to_thread(state.service.store.replies.annotate, reply.id, note)


async def _begun(
    chat: Chat, model: Model, body: ResponseRequest, owner: str, state: ServerState, key: str | None
) -> StoredMessage:
    wishes = to_chat_request(body, chat_messages(await resolve_references(chat, body.input)))
    check_answerable(wishes.messages)
    check_model(body.model, model, state.settings)
    messages = parse_history(wishes, state.settings.limits.messages).messages
    place = await place_response(chat, body, messages, to_record(body), state.branches, owner)
    parameters = _parameters(wishes, body, model, state)
    begins = partial(begin_response, state.service, chat, model, owner, place, parameters, key)
    return await begin_tracked(state, chat, owner, begins)


async def _let_in(state: ServerState, chat: Chat, reply: StoredMessage) -> None:
    """Waits for the engine's first word, so that what it refuses has a status of its own, and nothing is left of it."""
    turn = state.service.turns.get(reply.id)
    seconds = first_seconds(turn.utterance.request) if turn is not None else FIRST_SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), chat.events(reply.id) as entries:
            async for entry in entries:
                if isinstance(entry.event, Waiting | Started | Finished | Failed):
                    break
    if turn is not None and isinstance(turn.error, RequestError | ModelError) and not turn.utterance.steps:
        await delete_response(state, chat, response_id(reply.id))
        raise turn.error


def _parameters(wishes: ChatRequest, body: ResponseRequest, model: Model, state: ServerState) -> dict[str, Any]:
    parameters = whole_parameters(wishes, state.settings, model.format)
    return {**parameters, "overflow": "shorten"} if body.truncation == "auto" else parameters


def _raise_engine_failure(state: ServerState, reply: StoredMessage) -> None:
    """A reply that the engine failed at is an error to the request that waited for it, so that its client retries."""
    turn = state.service.turns.get(reply.id)
    if turn is not None and isinstance(turn.error, EngineError):
        raise turn.error


def _nothing() -> None:
    """A reply in the background goes on."""


def _stopping(state: ServerState, reply: StoredMessage) -> Callable[[], None]:
    def stop() -> None:
        turn = state.service.turns.get(reply.id)
        if turn is not None and not turn.log.ended:
            turn.utterance.stop()

    return stop


def _pieces(
    state: ServerState, chat: Chat, reply: StoredMessage, after: int = -1, include: Sequence[str] = ()
) -> AsyncGenerator[bytes]:
    telling = stored_encoder(reply, include)
    source = follow_response(state, chat, reply, _counts(reply, include), after < 0)
    return stream_events(telling, source, after)


async def _whole(state: ServerState, chat: Chat, reply: StoredMessage, include: Sequence[str] = ()) -> dict[str, Any]:
    source = follow_response(state, chat, reply, _counts(reply, include), True)
    try:
        return await complete_response(stored_encoder(reply, include), source)
    except ReplyParked as error:
        if state.closing.is_set():
            raise ShuttingDown from None
        raise EngineError(str(error)) from None


def _counts(reply: StoredMessage, include: Sequence[str]) -> bool:
    return LOGPROBS in (*read_record(reply).include, *include)


async def _as_it_stands(
    state: ServerState, chat: Chat, reply: StoredMessage, include: Sequence[str] = ()
) -> dict[str, Any]:
    assert reply.reply is not None
    telling = stored_encoder(reply, include)
    if reply.reply.status is ReplyStatus.RUNNING:
        turn = state.service.turns.get(reply.id)
        if turn is None:  # another process writes it, or it waits for the model to go on
            return telling.response("in_progress")
        telling.take([cast("ReadEvent", entry.event) for entry in turn.log.so_far()])
        return telling.response("in_progress" if turn.log.started else "queued")
    if _counts(reply, include):
        return await _whole(state, chat, reply, include)
    telling.take(replay_deltas(reply.parts))
    last = stored_ending(reply, ended_event(reply))
    if read_record(reply).cancelled:
        last = ResponseEnding("cancelled", last.usage)
    value: dict[str, Any] = telling.end(last)[-1]["response"]
    return value


async def _awake(state: ServerState, chat: Chat, reply: StoredMessage) -> StoredMessage:
    """A response that was put aside, with a server that ended or a model that went, goes on when it is asked for."""
    assert reply.reply is not None
    known = read_record(reply)
    if reply.reply.status is not ReplyStatus.INTERRUPTED or not known.asked or known.cancelled:
        return reply
    try:
        model = state.service.models.current()
    except PalaverError:
        return reply
    messages = state.service.store.messages
    below = await asyncio.to_thread(messages.children, reply.conversation_id, reply.id)
    if below or not is_same_tokenizer(model, reply):
        return reply
    return await chat.go_on(reply.id)


async def _with_first(first: asyncio.Future[bytes], stream: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield await first
        async for piece in stream:
            yield piece
    finally:
        await close_stream(first, stream)
