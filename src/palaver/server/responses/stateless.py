"""A response that is not stored: it belongs to its request, and ends when its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.chat.model import Model
from palaver.chat.reply_request import oldest_to_drop, spoken, without_oldest
from palaver.events import PhaseOpened, Usage
from palaver.generation import Finish
from palaver.messages import Message, Role
from palaver.phases import Phase
from palaver.server.openai.choices import ChoiceDelta, ChoiceStream, CompletionStream
from palaver.server.openai.disconnect import (
    close_on_failure,
    first_chunk,
    first_seconds,
    indexed_stream,
    limited_stream,
    run_while_connected,
)
from palaver.server.openai.messages import ChatHistory, parse_history
from palaver.server.openai.request import ChatCall, build_call, check_model
from palaver.server.openai.sampling_params import api_field_names, ignored_header
from palaver.server.openai.schemas import ChatRequest
from palaver.server.responses.encoder import ResponseEncoder, ResponseEnding
from palaver.server.responses.history import ResponsePlace, place_response, response_id
from palaver.server.responses.items import chat_messages, resolve_references
from palaver.server.responses.request import THEIRS, ignored_of, to_chat_request, to_record
from palaver.server.responses.schemas import ResponseRequest
from palaver.server.responses.streaming import (
    ResponseDelta,
    complete_response,
    effective_parameters,
    output_options,
    response_header,
    stream_events,
)
from palaver.server.sse import EventStream
from palaver.server.state import ServerState
from palaver.store import prompt_messages
from palaver.store.records import new_id

_STATUS = {Finish.END: "completed", Finish.STOP_STRING: "completed", Finish.LENGTH: "incomplete"}


async def answer_stateless(request: Request, body: ResponseRequest, owner: str, state: ServerState) -> Response:
    model = state.service.models.current()
    with api_field_names(THEIRS):
        what, place = await _asked(body, model, owner, state)
        speaking = CompletionStream(what, await asyncio.to_thread(what.utterances), state.metrics)
    stream = indexed_stream(state, speaking, limited_stream(state, speaking))
    telling = _telling(what, place)
    async with close_on_failure(stream):
        with api_field_names(THEIRS):
            first = await first_chunk(request, stream, first_seconds(what.request))
            source = _said(speaking.choices[0], stream, first)
            ignored = ignored_header(ignored_of(body, state.settings, model.format))
            if body.stream:
                return EventStream(stream_events(telling, source), ignored)
            return JSONResponse(await run_while_connected(request, complete_response(telling, source)), headers=ignored)


async def count_input_tokens(body: ResponseRequest, owner: str, state: ServerState) -> int:
    """How many tokens the model would read."""
    model = state.service.models.current()
    with api_field_names(THEIRS):
        what, _ = await _asked(body, model, owner, state)
        return len(await asyncio.to_thread(model.prompt, what.request, what.said, what.begun))


async def _asked(body: ResponseRequest, model: Model, owner: str, state: ServerState) -> tuple[ChatCall, ResponsePlace]:
    chat = state.service.chat(owner)
    wishes = to_chat_request(body, chat_messages(await resolve_references(chat, body.input)))
    check_model(body.model, model, state.settings)
    given = parse_history(wishes, state.settings.limits.messages)
    place = await place_response(chat, body, given.messages, to_record(body), state.branches, owner)
    return await asyncio.to_thread(_whole_request, wishes, place, given.begun, model, owner, state), place


def _whole_request(
    wishes: ChatRequest, place: ResponsePlace, begun: Message | None, model: Model, owner: str, state: ServerState
) -> ChatCall:
    """What was said before is read from the conversation, with its tokens; the rest may be remembered."""
    store, requests = state.service.store, state.service.requests
    path = spoken(place.path)
    said = (*store.messages.full_path(path), *place.messages)
    messages = prompt_messages(place.system, said)
    sent = [None] * sum(message.role is Role.ASSISTANT for message in messages)
    past = requests.past(model, path)
    if not place.path:
        past = state.remembered.past(owner, messages, sent)
    what = build_call(wishes, ChatHistory(messages, past, begun), model, state.settings, owner)
    if place.known.truncation == "disabled":
        return what
    dropped = oldest_to_drop(model, what.request, "shorten")
    return replace(what, request=replace(what.request, messages=without_oldest(messages, dropped)))


def _telling(what: ChatCall, place: ResponsePlace) -> ResponseEncoder:
    name = new_id()
    about = response_header(response_id(name), int(time.time()), what.model.name, place.known)
    about |= effective_parameters(what.request.sampling, what.request.tools, place.known)
    return ResponseEncoder(name, about, output_options(place.known))


async def _said(
    choice: ChoiceStream, stream: AsyncGenerator[ChoiceDelta], first: asyncio.Future[ChoiceDelta]
) -> AsyncGenerator[ResponseDelta]:
    try:
        async with aclosing(stream):
            yield ResponseDelta((PhaseOpened(Phase.THINKING),) if choice.opens_thinking else ())
            told = await first
            while True:
                yield ResponseDelta(told.events, told.logprobs, _ending(told, choice))
                told = await anext(stream)
    finally:
        first.cancel()


def _ending(told: ChoiceDelta, choice: ChoiceStream) -> ResponseEnding | None:
    """The usage counts what is new of a reply that is continued."""
    if told.finished is None:
        return None
    status, totals = _STATUS.get(told.finished.finish, "cancelled"), choice.count()
    counted = Usage(totals.prompt, totals.cached, totals.reply, totals.thinking)
    return ResponseEnding(status, counted, None, int(time.time()) if status == "completed" else None)
