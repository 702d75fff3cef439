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
from palaver.server.openai.answering import begun, closed_if_failing, first_seconds, held, kept, while_there
from palaver.server.openai.asking import Asked, asked_for, check_model
from palaver.server.openai.conversing import Conversing, conversing
from palaver.server.openai.fields import ChatRequest
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.speaking import Choice, Speaking, Told
from palaver.server.openai.unknown import ignored_header
from palaver.server.responses.fields import ResponseRequest
from palaver.server.responses.following import Said
from palaver.server.responses.heading import decided, heading, shows
from palaver.server.responses.items import chat_messages, resolved
from palaver.server.responses.kept import response_id
from palaver.server.responses.placing import Place, placed
from palaver.server.responses.streams import pieces, whole
from palaver.server.responses.telling import Ending, Telling
from palaver.server.responses.wanted import THEIRS, as_chat, as_kept, ignored_of
from palaver.server.state import State
from palaver.server.streaming import EventStream
from palaver.store import prompt_messages
from palaver.store.records import new_id

_STATUS = {Finish.END: "completed", Finish.STOP_STRING: "completed", Finish.LENGTH: "incomplete"}


async def answered(request: Request, body: ResponseRequest, owner: str, state: State) -> Response:
    model = state.service.models.current()
    with in_their_words(THEIRS):
        what, place = await _asked(body, model, owner, state)
        speaking = Speaking(what, await asyncio.to_thread(what.utterances), state.metrics)
    stream = kept(state, speaking, held(state, speaking))
    telling = _telling(what, place)
    async with closed_if_failing(stream):
        with in_their_words(THEIRS):
            first = await begun(request, stream, first_seconds(what.request))
            source = _said(speaking.choices[0], stream, first)
            ignored = ignored_header(ignored_of(body, state.settings, model.format))
            if body.stream:
                return EventStream(pieces(telling, source), ignored)
            return JSONResponse(await while_there(request, whole(telling, source)), headers=ignored)


async def counted(body: ResponseRequest, owner: str, state: State) -> int:
    """How many tokens the model would read."""
    model = state.service.models.current()
    with in_their_words(THEIRS):
        what, _ = await _asked(body, model, owner, state)
        return len(await asyncio.to_thread(model.prompt, what.request, what.said, what.begun))


async def _asked(body: ResponseRequest, model: Model, owner: str, state: State) -> tuple[Asked, Place]:
    chat = state.service.chat(owner)
    wishes = as_chat(body, chat_messages(await resolved(chat, body.input)))
    check_model(body.model, model, state.settings)
    given = conversing(wishes, state.settings.limits.messages)
    place = await placed(chat, body, given.messages, as_kept(body), state.branches, owner)
    return await asyncio.to_thread(_whole_request, wishes, place, given.begun, model, owner, state), place


def _whole_request(
    wishes: ChatRequest, place: Place, begun: Message | None, model: Model, owner: str, state: State
) -> Asked:
    """What was said before is read from the conversation, with its tokens; the rest may be remembered."""
    store, requests = state.service.store, state.service.requests
    path = spoken(place.path)
    said = (*store.messages.full_path(path), *place.messages)
    messages = prompt_messages(place.system, said)
    sent = [None] * sum(message.role is Role.ASSISTANT for message in messages)
    past = requests.past(model, path)
    if not place.path:
        past = state.remembered.past(owner, messages, sent)
    what = asked_for(wishes, Conversing(messages, past, begun), model, state.settings, owner)
    if place.known.truncation == "disabled":
        return what
    dropped = oldest_to_drop(model, what.request, "shorten")
    return replace(what, request=replace(what.request, messages=without_oldest(messages, dropped)))


def _telling(what: Asked, place: Place) -> Telling:
    name = new_id()
    about = heading(response_id(name), int(time.time()), what.model.name, place.known)
    about |= decided(what.request.sampling, what.request.tools, place.known)
    return Telling(name, about, shows(place.known))


async def _said(choice: Choice, stream: AsyncGenerator[Told], first: asyncio.Future[Told]) -> AsyncGenerator[Said]:
    try:
        async with aclosing(stream):
            yield Said((PhaseOpened(Phase.THINKING),) if choice.opens_thinking else ())
            told = await first
            while True:
                yield Said(told.events, told.logprobs, _ending(told, choice))
                told = await anext(stream)
    finally:
        first.cancel()


def _ending(told: Told, choice: Choice) -> Ending | None:
    """The usage counts what is new of a reply that is continued."""
    if told.finished is None:
        return None
    status, totals = _STATUS.get(told.finished.finish, "cancelled"), choice.count()
    counted = Usage(totals.prompt, totals.cached, totals.reply, totals.thinking)
    return Ending(status, counted, None, int(time.time()) if status == "completed" else None)
