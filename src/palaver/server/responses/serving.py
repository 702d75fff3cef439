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
from palaver.chat.subscription import FollowedReply
from palaver.errors import EngineError, PalaverError, ShuttingDown
from palaver.events import Failed, Finished, Started, Waiting
from palaver.messages import Role
from palaver.server.errors import ClientDisconnected
from palaver.server.openai.request import (
    ChatCall,
    ChatHistory,
    api_field_names,
    build_call,
    forbid_calls,
    ignored_header,
    parse_history,
    request_parameters,
)
from palaver.server.openai.schemas import ChatRequest
from palaver.server.openai.streaming import CompletionStream
from palaver.server.responses.history import (
    ResponseTarget,
    StoredResponse,
    find_response,
    last_reply,
    read_record,
    resolve_target,
    response_id,
    start_response,
    waits_for_approval,
)
from palaver.server.responses.mcp import (
    StillRunning,
    approval_answers,
    approval_items,
    decide_calls,
    force_calls,
    use_servers,
)
from palaver.server.responses.request import (
    FIELD_NAMES,
    InputMessages,
    check_answerable,
    convert_input,
    ignored_request_fields,
    load_items,
    mcp_tools,
    only_instructions,
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
    start_tracked,
    stateless_encoder,
    stored_encoder,
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
from palaver.store.tool_rounds import RoundState

_KEY_HEADER = "idempotency-key"


async def answer_stored(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    """Creates a stored response. Unless it runs in the background, a disconnect of its client stops it; the text so far
    is kept."""
    chat, model = state.service.chat(owner), await state.model(body.model)
    with api_field_names(FIELD_NAMES):
        if approval_items(body.input):
            response = await _decide_calls(chat, model, body, state)
        else:
            key = request.headers.get(_KEY_HEADER)
            response = StoredResponse(await _start_reply(chat, model, body, owner, state, key))
        ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
    if body.background and not body.stream:
        return JSONResponse(stored_encoder(response).response("queued"), headers=ignored)
    stream = await chat.reply_stream(response.reply.id)
    on_disconnect = _keep_running if body.background else partial(_stop_soon, state, chat, response)
    try:
        with api_field_names(FIELD_NAMES):
            if not response.after_approval:
                await run_while_connected(request, _wait_accepted(state, chat, response.reply, stream))
        if body.stream:
            return EventStream(_stream(state, chat, owner, response), ignored, on_disconnect=on_disconnect)
        value = await run_while_connected(request, _complete(state, chat, owner, response))
        if isinstance(stream.error, EngineError):
            raise stream.error  # so that the client retries
        return JSONResponse(value, headers=ignored)
    except ClientDisconnected:
        on_disconnect()
        raise


async def answer_stateless(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    """Creates a response that is not stored. It ends when its client disconnects."""
    model = await state.model(body.model)
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
    model = await state.model(body.model)
    with api_field_names(FIELD_NAMES):
        call, _ = await _parse_request(body, model, owner, state)
        return len(await asyncio.to_thread(model.prompt, call.request, call.partial_ids, call.partial))


async def read_response(
    state: ServerState, chat: ServerChat, owner: str, id: str, include: Sequence[str] = ()
) -> dict[str, Any]:
    """The response so far."""
    response = await find_response(chat, id)
    await _resume_parked(state, chat, await last_reply(chat, response.reply))
    return await _current_value(state, chat, owner, await find_response(chat, id), include)


async def stream_stored(
    request: Request, state: ServerState, chat: ServerChat, owner: str, id: str, after: int, include: Sequence[str]
) -> Response:
    """Streams the events after a sequence number, to the end."""
    response = await find_response(chat, id)
    await _resume_parked(state, chat, await last_reply(chat, response.reply))
    stream = _stream(state, chat, owner, await find_response(chat, id), after, include)
    async with close_on_failure(stream):
        first = await first_chunk(request, stream)
    return EventStream(with_first(first, stream))


async def cancel_response(state: ServerState, chat: ServerChat, owner: str, id: str) -> dict[str, Any]:
    """Stops a running response and returns it. A response that has ended stays as it is."""
    reply = await last_reply(chat, (await find_response(chat, id)).reply)
    await _stop_running(chat, reply)
    if reply.reply is not None and reply.reply.status is ReplyStatus.INTERRUPTED:
        await _annotate(chat, reply, cancelled=True)
    return await _current_value(state, chat, owner, await find_response(chat, id))


async def delete_response(state: ServerState, chat: ServerChat, id: str) -> None:
    """Marks the response as deleted. The conversation is deleted with the last of its replies: until then other replies
    may depend on this one."""
    reply = (await find_response(chat, id)).reply
    await _stop_running(chat, await last_reply(chat, reply))
    await _annotate(chat, reply, deleted=True)
    replies = [reply.id]
    while (round := await chat.tool_round(replies[-1])) is not None and round.next_id is not None:
        replies.append(round.next_id)
        await _annotate(chat, await chat.message(round.next_id), deleted=True)
    everything = await chat.all_messages(reply.conversation_id)
    if all(read_record(message).deleted for message in everything if message.role is Role.ASSISTANT and message.reply):
        await chat.delete_conversation(reply.conversation_id)


async def input_items(chat: ServerChat, id: str) -> list[dict[str, Any]]:
    """The input items of the request, the oldest first."""
    response = await find_response(chat, id)
    reply, record = response.reply, response.record
    if response.after_approval:
        return approval_answers(response)
    path = await chat.path(reply.parent_id) if reply.parent_id is not None else ()
    inputs = path[-(record.inputs or 1) :]
    items = await load_items(chat, inputs)
    if developer := record.developer:
        content = [{"type": "input_text", "text": developer}]
        header = {"id": f"dev_{reply.id}", "type": "message", "role": "system", "status": "completed"}
        items.insert(0, {**header, "content": content})
    return items


async def _stop_running(chat: ServerChat, reply: StoredMessage) -> None:
    """Stops a running reply and waits for its end, or stops its tool calls unless they wait for an approval."""
    if reply.reply is None or reply.reply.status is not ReplyStatus.RUNNING:
        round = await chat.tool_round(reply.id)
        if round is not None and round.state is RoundState.OPEN and not waits_for_approval(round):
            await chat.stop_reply(reply.id)
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
    parameters = _parameters(chat_request, body, model, state)
    servers, record = await use_servers(chat, mcp_tools(body), target.record)
    parameters |= servers | force_calls(body, record)
    start = partial(start_response, chat, replace(target, record=record), parameters, key)
    return await start_tracked(state, chat, owner, start)


async def _decide_calls(chat: ServerChat, model: Model, body: ResponseRequest, state: ServerState) -> StoredResponse:
    """Decides about the tool calls of the response before."""
    parameters = partial(_parameters, to_chat_request(body, ()), body, model, state)
    return await decide_calls(chat, body, to_record(body), parameters)


def _parameters(chat_request: ChatRequest, body: ResponseRequest, model: Model, state: ServerState) -> dict[str, Any]:
    parameters = {**request_parameters(chat_request, state.settings, model.format), "model": model.name}
    if body.truncation == "auto":
        parameters["overflow"] = "shorten"
    if body.tool_choice == "none" and mcp_tools(body):
        parameters |= forbid_calls(parameters, model.format)
    return parameters


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


def _stop_soon(state: ServerState, chat: ServerChat, response: StoredResponse) -> None:
    """Stops the response of a client that disconnected, in this process or another."""

    async def stop() -> None:
        with suppress(PalaverError):
            await _stop_running(chat, await last_reply(chat, await chat.message(response.reply.id)))

    task = asyncio.create_task(stop())
    state.background_tasks.add(task)
    task.add_done_callback(state.background_tasks.discard)


def _stream(
    state: ServerState,
    chat: ServerChat,
    owner: str,
    response: StoredResponse,
    after: int = -1,
    include: Sequence[str] = (),
) -> AsyncGenerator[bytes]:
    encoder = stored_encoder(response, include)
    source = follow_response(state, chat, owner, response, _includes_logprobs(response, include), after < 0)
    return stream_events(encoder, source, after)


async def _complete(
    state: ServerState, chat: ServerChat, owner: str, response: StoredResponse, include: Sequence[str] = ()
) -> dict[str, Any]:
    source = follow_response(state, chat, owner, response, _includes_logprobs(response, include))
    try:
        return await complete_response(stored_encoder(response, include), source)
    except ReplyParked as error:
        if state.closing.is_set():
            raise ShuttingDown from None
        raise EngineError(str(error)) from None


def _includes_logprobs(response: StoredResponse, include: Sequence[str]) -> bool:
    return LOGPROBS in (*response.record.include, *include)


async def _current_value(
    state: ServerState, chat: ServerChat, owner: str, response: StoredResponse, include: Sequence[str] = ()
) -> dict[str, Any]:
    encoder = stored_encoder(response, include)
    try:
        value = await complete_response(
            encoder, follow_response(state, chat, owner, response, logprobs=False, wait=False)
        )
    except StillRunning as running:
        return encoder.response("queued" if running.is_queued else "in_progress")
    return await _complete(state, chat, owner, response, include) if _includes_logprobs(response, include) else value


async def _resume_parked(state: ServerState, chat: ServerChat, reply: StoredMessage) -> None:
    """Resumes a response that was interrupted by a shutdown or a change of the model."""
    assert reply.reply is not None
    record = read_record(reply)
    if reply.reply.status is not ReplyStatus.INTERRUPTED or not record.asked or record.cancelled:
        return
    models, settings = state.service.models, reply.reply.settings
    model = models.reader_for(settings.model, settings.tokenizer)
    has_children = any(node.parent_id == reply.id for node in await chat.nodes(reply.conversation_id))
    if has_children or model is None or not (is_same_tokenizer(model, reply) or models.offers(settings.model)):
        return
    await chat.continue_reply(reply.id)


async def _parse_request(
    body: ResponseRequest, model: Model, owner: str, state: ServerState
) -> tuple[ChatCall, ResponseTarget]:
    chat = state.service.chat(owner)
    chat_request, parsed, target = await _resolve(chat, model, body, owner, state)
    path = without_empty_replies(target.path)
    history = (*await chat.load_messages(path), *target.messages)
    messages = prompt_messages(target.system, history)
    past = await chat.past_replies(path, model.name)
    call = await asyncio.to_thread(
        _build_call, chat_request, ChatHistory(messages, past, parsed.partial), target, model, owner, state
    )
    return call, target


async def _resolve(
    chat: ServerChat, model: Model, body: ResponseRequest, owner: str, state: ServerState, stored: bool = False
) -> tuple[ChatRequest, ChatHistory, ResponseTarget]:
    """The request as a chat request, its messages, and the branch that they continue."""
    items = await resolve_references(chat, body.input, state.settings.limits.body_bytes)
    converted = InputMessages() if only_instructions(body) else convert_input(items)
    chat_request = to_chat_request(body, converted.messages)
    if stored:
        check_answerable(chat_request.messages)
    attachments = state.attachments(model)
    limit = state.settings.limits.messages
    parsed = await asyncio.to_thread(parse_history, chat_request, limit, attachments, converted.places)
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
