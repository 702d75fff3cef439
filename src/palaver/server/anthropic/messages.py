"""`/v1/messages`: streaming and not is one path; not streaming is folding."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from palaver.errors import BadParameter
from palaver.server.anthropic.asking import asked, ignored_of
from palaver.server.anthropic.fields import CountRequest, MessagesRequest, MessageTold
from palaver.server.anthropic.landing import landed
from palaver.server.anthropic.naming import NAMES
from palaver.server.anthropic.speaking import Spoken
from palaver.server.anthropic.streams import folded, streamed
from palaver.server.callers import Whoever
from palaver.server.openai.answering import begun, closed_if_failing, first_seconds, held, kept, while_there
from palaver.server.openai.landing import conversation_of
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.speaking import Speaking
from palaver.server.openai.unknown import ignored_header
from palaver.server.state import State, StateOf

FIRST_VERSION = "2023-06-01"
"""The first with the events that are sent here. What later versions took away is still taken here."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


_TOLD: dict[int | str, dict[str, Any]] = {
    200: {"model": MessageTold, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


class TokenCount(BaseModel):
    input_tokens: int


def router() -> APIRouter:
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=None, responses=_TOLD)
    async def messages(request: Request, body: MessagesRequest, caller: Whoever, state: StateOf) -> Response:
        """A reply to a conversation, whole or as a stream of server-sent events. One that is named by
        `metadata.conversation` (or the header `x-conversation`; `new` makes one) keeps what is said."""
        _check_version(request)
        named = conversation_of(body.metadata, request.headers)
        if named is not None:
            return await landed(request, body, named, caller.owner_id, state)
        return await answered(request, body, caller.owner_id, state)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest, caller: Whoever, state: StateOf) -> TokenCount:
        """How many tokens the model would read."""
        _check_version(request)
        return TokenCount(input_tokens=await asyncio.to_thread(_counted, body, caller.owner_id, state))

    return routes


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", FIRST_VERSION)
    if not _DAY.fullmatch(version) or version < FIRST_VERSION:
        raise BadParameter("anthropic-version", version[:80], f"must be {FIRST_VERSION} or later")


def _counted(body: CountRequest, owner: str, state: State) -> int:
    model = state.service.models.current()
    with in_their_words(NAMES):
        what = asked(body, model, state.settings, owner, state.remembered)
        given = what.request
        return len(model.format.render(given.messages, given.tools, given.options, what.said, what.begun, given.past))


async def answered(request: Request, body: MessagesRequest, owner: str, state: State) -> Response:
    model = state.service.models.current()
    with in_their_words(NAMES):
        what = await asyncio.to_thread(asked, body, model, state.settings, owner, state.remembered)
        speaking = Speaking(what, await asyncio.to_thread(what.utterances), state.metrics)
    stream = kept(state, speaking, held(state, speaking))
    spoken = Spoken(body, speaking.choices[0])
    ignored = ignored_header(ignored_of(body, model, state.settings))
    async with closed_if_failing(stream):
        with in_their_words(NAMES):
            first = await begun(request, stream, first_seconds(what.request))
            events = spoken.events(stream, first)
            if not body.stream:
                return JSONResponse(await while_there(request, folded(events)), headers=ignored)
        return streamed(events, request, ignored)
