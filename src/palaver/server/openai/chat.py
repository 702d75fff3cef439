"""`/v1/chat/completions`: streaming and not is one path; not streaming is folding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from palaver.server.bodies import Left
from palaver.server.callers import Whoever
from palaver.server.errors import error_body, note
from palaver.server.openai.answering import begun, held, while_there
from palaver.server.openai.asking import asked
from palaver.server.openai.fields import ChatRequest
from palaver.server.openai.landing import conversation_of, landed
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.speaking import Speaking, Told
from palaver.server.openai.telling import DONE, Chunks, Whole, ending, heading, usage
from palaver.server.state import State, StateOf
from palaver.server.streaming import EventStream


def router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest, caller: Whoever, state: StateOf) -> Response:
        """A reply to a conversation, whole or as a stream of server-sent events. One that is named by
        `metadata.conversation` (or the header `x-conversation`; `new` makes one) keeps what is said."""
        named = conversation_of(body, request.headers)
        if named is not None:
            return await landed(request, body, named, caller.owner_id, state)
        return await answered(request, body, caller.owner_id, state)

    return routes


async def answered(request: Request, body: ChatRequest, owner: str, state: State) -> Response:
    model = state.service.models.current()
    with in_their_words():
        what = await asyncio.to_thread(asked, body, model, state.settings, owner, state.remembered)
        speaking = Speaking(what, await asyncio.to_thread(what.utterances), state.metrics)
    stream = _kept(state, speaking, held(state, speaking))
    try:
        with in_their_words():
            if not what.shown.stream:
                return JSONResponse(await while_there(request, _whole(speaking, stream)))
            first = await begun(request, stream)
        return EventStream(_chunks(speaking, stream, first))
    except Left:
        await stream.aclose()
        return Response(status_code=499)
    except BaseException:
        await stream.aclose()
        raise


async def _kept(state: State, speaking: Speaking, stream: AsyncGenerator[Told]) -> AsyncGenerator[Told]:
    """The stream; the tokens of each reply are remembered when it ends, for when its words come back."""
    request = speaking.asked.request
    async with aclosing(stream):
        async for told in stream:
            if told.finished is not None:
                reply = speaking.choices[told.index].utterance.reply()
                state.remembered.keep(request.owner, request.messages, reply.message, reply.token_ids)
            yield told


async def _chunks(
    speaking: Speaking, stream: AsyncGenerator[Told], first: asyncio.Future[Told]
) -> AsyncGenerator[bytes]:
    what = speaking.asked
    chunks = Chunks(heading(what.model), what.shown, _prompt_ids(speaking))
    try:
        yield b"".join(chunks.opening(index) for index in range(what.choices))
        told = await first
        while True:
            if piece := _piece(chunks, speaking, told):
                yield piece
            told = await anext(stream)
    except StopAsyncIteration:
        if what.shown.usage:
            yield chunks.usage(usage([choice.totals for choice in speaking.choices]))
        yield DONE
    except Exception as error:
        note(error)
        yield b"data: " + error_body(error) + b"\n\n" + DONE
    finally:
        first.cancel()
        await stream.aclose()


def _piece(chunks: Chunks, speaking: Speaking, told: Told) -> bytes:
    return chunks.of(told, ending(speaking.choices[told.index]) if told.finished is not None else None)


async def _whole(speaking: Speaking, stream: AsyncGenerator[Told]) -> dict[str, Any]:
    what = speaking.asked
    wholes = [Whole() for _ in speaking.choices]
    async with aclosing(stream):
        async for told in stream:
            wholes[told.index].take(told)
    choices = [
        whole.value(choice.index, what.shown, ending(choice))
        for whole, choice in zip(wholes, speaking.choices, strict=True)
    ]
    value = {**heading(what.model).value("chat.completion"), "choices": choices}
    value["usage"] = usage([choice.totals for choice in speaking.choices])
    return {**value, **_prompt_ids(speaking)}


def _prompt_ids(speaking: Speaking) -> dict[str, list[int]]:
    prompt = speaking.choices[0].utterance.prompt
    return {"prompt_token_ids": list(prompt.context_ids)} if speaking.asked.shown.token_ids else {}
