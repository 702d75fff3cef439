"""Responses that are not stored (`store: false`). They end when their client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.model import Model
from palaver.chat.reply_request import fit_prompt, without_empty_replies, without_oldest
from palaver.events import PhaseOpened
from palaver.generation import Finish
from palaver.messages import Role
from palaver.phases import Phase
from palaver.server.openai.choices import ChoiceDelta, ChoiceStream, CompletionStream
from palaver.server.openai.request import (
    ChatCall,
    ChatHistory,
    api_field_names,
    build_call,
    check_model,
    ignored_header,
    parse_history,
)
from palaver.server.openai.schemas import ChatRequest
from palaver.server.responses.encoder import ResponseEncoder, ResponseEnding
from palaver.server.responses.history import ResponseTarget, resolve_target, response_id
from palaver.server.responses.items import chat_messages, resolve_references
from palaver.server.responses.request import FIELD_NAMES, ignored_request_fields, to_chat_request, to_record
from palaver.server.responses.schemas import ResponseRequest
from palaver.server.responses.streaming import (
    ResponseDelta,
    complete_response,
    effective_parameters,
    output_options,
    response_header,
    stream_events,
)
from palaver.server.sse import (
    EventStream,
    close_on_failure,
    close_stream,
    first_chunk,
    first_seconds,
    run_while_connected,
)
from palaver.server.state import ServerState
from palaver.store import prompt_messages
from palaver.store.records import new_id

_STATUSES = {Finish.END: "completed", Finish.STOP_STRING: "completed", Finish.LENGTH: "incomplete"}


async def answer_stateless(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    model = state.service.models.current()
    with api_field_names(FIELD_NAMES):
        call, target = await _parse_request(body, model, owner, state)
        reply_streams = await asyncio.to_thread(call.reply_streams)
        completion = CompletionStream(call, reply_streams, state.metrics, state.limiter, state.reply_index)
    stream = completion.deltas()
    encoder = _encoder(call, target)
    async with close_on_failure(stream):
        with api_field_names(FIELD_NAMES):
            first = await first_chunk(request, stream, first_seconds(call.request))
            source = _deltas(completion.choices[0], stream, first)
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


async def _parse_request(
    body: ResponseRequest, model: Model, owner: str, state: ServerState
) -> tuple[ChatCall, ResponseTarget]:
    chat = state.service.chat(owner)
    chat_request = to_chat_request(body, chat_messages(await resolve_references(chat, body.input)))
    check_model(body.model, model, state.settings)
    parsed = parse_history(chat_request, state.settings.limits.messages)
    target = await resolve_target(chat, body, parsed.messages, to_record(body), state.response_index, owner)
    path = without_empty_replies(target.path)
    history = (*await chat.load_messages(path), *target.messages)
    messages = prompt_messages(target.system, history)
    past = await chat.past_replies(path)
    call = await asyncio.to_thread(
        _build_call, chat_request, ChatHistory(messages, past, parsed.partial), target, model, owner, state
    )
    return call, target


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


def _encoder(call: ChatCall, target: ResponseTarget) -> ResponseEncoder:
    id = new_id()
    header = response_header(response_id(id), int(time.time()), call.model.name, target.record)
    header |= effective_parameters(call.request.sampling, call.request.tools, target.record)
    return ResponseEncoder(id, header, output_options(target.record))


async def _deltas(
    choice: ChoiceStream, stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta]
) -> AsyncGenerator[ResponseDelta]:
    try:
        yield ResponseDelta((PhaseOpened(Phase.THINKING),) if choice.opens_thinking else ())
        delta: ChoiceDelta | None = await first
        while delta is not None:
            yield ResponseDelta(delta.events, delta.logprobs, _ending(delta, choice))
            delta = await anext(stream, None)
    finally:
        await close_stream(first, stream)


def _ending(delta: ChoiceDelta, choice: ChoiceStream) -> ResponseEnding | None:
    """The ending with the last delta, else None. The usage of a continued reply counts only its new tokens."""
    if delta.finished is None:
        return None
    status = _STATUSES.get(delta.finished.finish, "cancelled")
    return ResponseEnding(status, choice.usage, None, int(time.time()) if status == "completed" else None)
