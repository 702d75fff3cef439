"""`/v1/chat/completions`: streaming and not is one path; not streaming is folding."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from palaver.server.callers import Whoever
from palaver.server.openai.answering import held, kept
from palaver.server.openai.asking import asked, ignored_of
from palaver.server.openai.fields import ChatRequest
from palaver.server.openai.landing import conversation_of, landed
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.sounding import sounding_of
from palaver.server.openai.speaking import Speaking
from palaver.server.openai.streams import answer
from palaver.server.openai.unknown import ignored_header
from palaver.server.state import State, StateOf


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest, caller: Whoever, state: StateOf) -> Response:
        """A reply to a conversation, whole or as a stream of server-sent events. One that is named by
        `metadata.conversation` (or the header `x-conversation`; `new` makes one) keeps what is said."""
        state.transcripts.fill_in(caller.owner_id, body.messages)
        named = conversation_of(body.metadata, request.headers)
        if named is not None:
            return await landed(request, body, named, caller.owner_id, state)
        return await answered(request, body, caller.owner_id, state)

    return routes


async def answered(request: Request, body: ChatRequest, owner: str, state: State) -> Response:
    model = state.service.models.current()
    with in_their_words():
        what = await asyncio.to_thread(asked, body, model, state.settings, owner, state.remembered)
        speaking = Speaking(what, await asyncio.to_thread(what.utterances), state.metrics)
        sounding = await sounding_of(what.shown, owner, state)
    stream = kept(state, speaking, held(state, speaking))
    stream = stream if sounding is None else sounding.of(stream)
    ignored = ignored_header(ignored_of(body, state.settings, model.format))
    return await answer(request, speaking, stream, headers=ignored)
