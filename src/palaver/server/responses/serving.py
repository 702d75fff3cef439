"""Responses from request to answer: created stored or not, retrieved, streamed, cancelled and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.continuation import is_same_tokenizer
from palaver.chat.interface import ServerChat
from palaver.chat.model import Model
from palaver.chat.reply_request import fit_prompt, without_empty_replies, without_oldest
from palaver.chat.subscription import FollowedReply, ended_event
from palaver.errors import EngineError, PalaverError, ShuttingDown
from palaver.events import Failed, Finished, Started, Waiting
from palaver.messages import Role
from palaver.server.errors import ClientDisconnected
from palaver.server.openai.request import (
    ChatCall,
    ChatHistory,
    api_field_names,
    build_call,
    check_model,
    ignored_header,
    parse_history,
    request_parameters,
)
from palaver.server.openai.schemas import ChatRequest
from palaver.server.openai.streaming import CompletionStream
from palaver.server.responses.encoder import ResponseEnding, message_items
from palaver.server.responses.history import (
    ResponseTarget,
    find_response,
    read_record,
    resolve_target,
    response_id,
    start_response,
)
from palaver.server.responses.request import (
    FIELD_NAMES,
    chat_messages,
    check_answerable,
    ignored_request_fields,
    resolve_references,
    to_chat_request,
    to_record,
)
from palaver.server.responses.schemas import LOGPROBS, ResponseRequest
from palaver.server.responses.streaming import (
    ReplyParked,
    complete_response,
    follow_response,
    read_choice,
    replay_deltas,
    start_tracked,
    stateless_encoder,
    stored_encoder,
    stored_ending,
    stream_events,
)
from palaver.server.sse import (
    EventStream,
    close_on_failure,
    first_chunk,
    first_seconds,
    run_while_connected,
    with_first,
)
from palaver.server.state import ServerState
from palaver.store import ReplyStatus, StoredMessage, prompt_messages

_KEY_HEADER = "idempotency-key"


async def answer_stored(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    """Creates a stored response. Unless it runs in the background, a disconnect of its client stops it; the text so far
    is kept."""
    chat, model = state.service.chat(owner), state.service.models.current()
    with api_field_names(FIELD_NAMES):
        reply = await _start_reply(chat, model, body, owner, state, request.headers.get(_KEY_HEADER))
        ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
    if body.background and not body.stream:
        return JSONResponse(stored_encoder(reply).response("queued"), headers=ignored)
    stream = await chat.reply_stream(reply.id)
    on_disconnect = _keep_running if body.background else stream.stop
    try:
        with api_field_names(FIELD_NAMES):
            await run_while_connected(request, _wait_accepted(state, chat, reply, stream))
        if body.stream:
            return EventStream(_stream(state, chat, reply), ignored, on_disconnect=on_disconnect)
        value = await run_while_connected(request, _complete(state, chat, reply))
        if isinstance(stream.error, EngineError):
            raise stream.error  # so that the client retries
        return JSONResponse(value, headers=ignored)
    except ClientDisconnected:
        on_disconnect()
        raise


async def answer_stateless(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    """Creates a response that is not stored. It ends when its client disconnects."""
    model = state.service.models.current()
    with api_field_names(FIELD_NAMES):
        call, target = await _parse_request(body, model, owner, state)
        reply_streams = await asyncio.to_thread(call.reply_streams)
        completion = CompletionStream(call, reply_streams, state.metrics, state.limiter, state.reply_index)
    stream = completion.deltas()
    encoder = stateless_encoder(call.model.name, call.request, target.record)
    async with close_on_failure(stream):
        with api_field_names(FIELD_NAMES):
            first = await first_chunk(request, stream, first_seconds(call.request))
            source = read_choice(completion.choices[0], stream, first)
            ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
            if body.stream:
                return EventStream(stream_events(encoder, source), ignored)
            return JSONResponse(await run_while_connected(request, complete_response(encoder, source)), headers=ignored)


async def count_input_tokens(body: ResponseRequest, owner: str, state: ServerState) -> int:
    """The token count of the prompt."""
    model = state.service.models.current()
    with api_field_names(FIELD_NAMES):
        call, _ = await _parse_request(body, model, owner, state)
        return len(await asyncio.to_thread(model.prompt, call.request, call.partial_ids, call.partial))


async def read_response(state: ServerState, chat: ServerChat, id: str, include: Sequence[str] = ()) -> dict[str, Any]:
    """The response so far."""
    return await _current_value(state, chat, await _resume_parked(state, chat, await find_response(chat, id)), include)


async def stream_stored(
    request: Request, state: ServerState, chat: ServerChat, id: str, after: int, include: Sequence[str]
) -> Response:
    """Streams the events after a sequence number, to the end."""
    reply = await _resume_parked(state, chat, await find_response(chat, id))
    stream = _stream(state, chat, reply, after, include)
    async with close_on_failure(stream):
        first = await first_chunk(request, stream)
    return EventStream(with_first(first, stream))


async def cancel_response(state: ServerState, chat: ServerChat, id: str) -> dict[str, Any]:
    """Stops a running response and returns it. A response that has ended stays as it is."""
    reply = await find_response(chat, id)
    await _stop_running(chat, reply)
    if reply.reply is not None and reply.reply.status is ReplyStatus.INTERRUPTED:
        await _annotate(chat, reply, cancelled=True)
    return await _current_value(state, chat, await find_response(chat, id))


async def delete_response(state: ServerState, chat: ServerChat, id: str) -> None:
    """Marks the response as deleted. The conversation is deleted with the last of its replies: until then other replies
    may depend on this one."""
    reply = await find_response(chat, id)
    await _stop_running(chat, reply)
    await _annotate(chat, reply, deleted=True)
    everything = await chat.all_messages(reply.conversation_id)
    if all(read_record(message).deleted for message in everything if message.role is Role.ASSISTANT and message.reply):
        await chat.delete_conversation(reply.conversation_id)


async def input_items(chat: ServerChat, id: str) -> list[dict[str, Any]]:
    """The input items of the request, the oldest first."""
    reply = await find_response(chat, id)
    path = await chat.path(reply.parent_id) if reply.parent_id is not None else ()
    record = read_record(reply)
    inputs = path[-(record.inputs or 1) :]
    items = [item for message in inputs for item in message_items(message.id, message.role, message.parts)]
    if developer := record.developer:
        content = [{"type": "input_text", "text": developer}]
        header = {"id": f"dev_{reply.id}", "type": "message", "role": "system", "status": "completed"}
        items.insert(0, {**header, "content": content})
    return items


async def _stop_running(chat: ServerChat, reply: StoredMessage) -> None:
    """Stops a running reply and waits for its end."""
    if reply.reply is None or reply.reply.status is not ReplyStatus.RUNNING:
        return
    await chat.stop_reply(reply.id)
    async with chat.events(reply.id) as entries:
        async for _ in entries:
            pass


async def _annotate(chat: ServerChat, reply: StoredMessage, **marks: bool) -> None:
    await chat.annotate_reply(reply.id, read_record(reply).model_copy(update={**marks, "of": reply.id}).note())


async def _start_reply(
    chat: ServerChat, model: Model, body: ResponseRequest, owner: str, state: ServerState, key: str | None
) -> StoredMessage:
    chat_request, _, target = await _resolve(chat, model, body, owner, state, stored=True)
    parameters = request_parameters(chat_request, state.settings, model.format)
    if body.truncation == "auto":
        parameters["overflow"] = "shorten"
    start = partial(start_response, chat, target, parameters, key)
    return await start_tracked(state, chat, owner, start)


async def _wait_accepted(state: ServerState, chat: ServerChat, reply: StoredMessage, stream: FollowedReply) -> None:
    """Waits until the engine accepts the request. A request that it refuses fails with an HTTP status, and its response
    is deleted."""
    with suppress(TimeoutError):
        async with asyncio.timeout(first_seconds(stream.request)), chat.events(reply.id) as entries:
            async for entry in entries:
                if isinstance(entry.event, Waiting | Started | Finished | Failed):
                    break
    if stream.refusal is not None:
        await delete_response(state, chat, response_id(reply.id))
        raise stream.refusal


def _keep_running() -> None:
    """A background response continues after its client disconnects."""


def _stream(
    state: ServerState, chat: ServerChat, reply: StoredMessage, after: int = -1, include: Sequence[str] = ()
) -> AsyncGenerator[bytes]:
    encoder = stored_encoder(reply, include)
    source = follow_response(state, chat, reply, _includes_logprobs(reply, include), after < 0)
    return stream_events(encoder, source, after)


async def _complete(
    state: ServerState, chat: ServerChat, reply: StoredMessage, include: Sequence[str] = ()
) -> dict[str, Any]:
    source = follow_response(state, chat, reply, _includes_logprobs(reply, include), True)
    try:
        return await complete_response(stored_encoder(reply, include), source)
    except ReplyParked as error:
        if state.closing.is_set():
            raise ShuttingDown from None
        raise EngineError(str(error)) from None


def _includes_logprobs(reply: StoredMessage, include: Sequence[str]) -> bool:
    return LOGPROBS in (*read_record(reply).include, *include)


async def _current_value(
    state: ServerState, chat: ServerChat, reply: StoredMessage, include: Sequence[str] = ()
) -> dict[str, Any]:
    assert reply.reply is not None
    encoder = stored_encoder(reply, include)
    if reply.reply.status is ReplyStatus.RUNNING:
        stream = await chat.reply_stream(reply.id, wait=False)
        if not stream.is_here:  # another process runs it, or it waits for the model
            return encoder.response("in_progress")
        encoder.feed(stream.log.events())
        return encoder.response("in_progress" if stream.log.started else "queued")
    if _includes_logprobs(reply, include):
        return await _complete(state, chat, reply, include)
    encoder.feed(replay_deltas(reply.parts))
    last = stored_ending(reply, ended_event(reply))
    if read_record(reply).cancelled:
        last = ResponseEnding("cancelled", last.usage)
    value: dict[str, Any] = encoder.finish(last)[-1]["response"]
    return value


async def _resume_parked(state: ServerState, chat: ServerChat, reply: StoredMessage) -> StoredMessage:
    """Resumes a response that was interrupted by a shutdown or a change of the model."""
    assert reply.reply is not None
    record = read_record(reply)
    if reply.reply.status is not ReplyStatus.INTERRUPTED or not record.asked or record.cancelled:
        return reply
    try:
        model = state.service.models.current()
    except PalaverError:
        return reply
    has_children = any(node.parent_id == reply.id for node in await chat.nodes(reply.conversation_id))
    if has_children or not is_same_tokenizer(model, reply):
        return reply
    return await chat.continue_reply(reply.id)


async def _parse_request(
    body: ResponseRequest, model: Model, owner: str, state: ServerState
) -> tuple[ChatCall, ResponseTarget]:
    chat = state.service.chat(owner)
    chat_request, parsed, target = await _resolve(chat, model, body, owner, state)
    path = without_empty_replies(target.path)
    history = (*await chat.load_messages(path), *target.messages)
    messages = prompt_messages(target.system, history)
    past = await chat.past_replies(path)
    call = await asyncio.to_thread(
        _build_call, chat_request, ChatHistory(messages, past, parsed.partial), target, model, owner, state
    )
    return call, target


async def _resolve(
    chat: ServerChat, model: Model, body: ResponseRequest, owner: str, state: ServerState, stored: bool = False
) -> tuple[ChatRequest, ChatHistory, ResponseTarget]:
    """The request as a chat request, its messages, and the branch that they continue."""
    chat_request = to_chat_request(body, chat_messages(await resolve_references(chat, body.input)))
    if stored:
        check_answerable(chat_request.messages)
    check_model(body.model, model, state.settings)
    attachments = state.attachments(model)
    parsed = await asyncio.to_thread(parse_history, chat_request, state.settings.limits.messages, attachments)
    target = await resolve_target(chat, body, parsed.messages, to_record(body), state.response_index, owner)
    return chat_request, parsed, target


def _build_call(
    chat_request: ChatRequest,
    history: ChatHistory,
    target: ResponseTarget,
    model: Model,
    owner: str,
    state: ServerState,
) -> ChatCall:
    """The history comes from the conversation, with its tokens. Without one, token ids come from the reply index."""
    messages = history.messages
    if not target.path:
        sent = [None] * sum(message.role is Role.ASSISTANT for message in messages)
        history = replace(history, past=state.reply_index.lookup(owner, messages, sent))
    call = build_call(chat_request, history, model, state.settings, owner)
    if target.record.truncation == "disabled":
        return call
    dropped, _ = fit_prompt(model, call.request, "shorten")
    return replace(call, request=without_oldest(call.request, dropped))
