"""A reply as the answer to a request: whole, or in chunks as it is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.server.errors import error_body, note
from palaver.server.openai.answering import begun, closed_if_failing, first_seconds, let_go, while_there
from palaver.server.openai.asking import Usage
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.speaking import Speaking, Told
from palaver.server.openai.telling import DONE, Chunks, Whole, ending, heading
from palaver.server.streaming import EventStream


async def answer(
    request: Request,
    speaking: Speaking,
    stream: AsyncGenerator[Told],
    more: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`stream` is what is said of it; `more` is told with the whole, or with the first chunk."""
    about = {**_prompt_ids(speaking), **(more or {})}
    async with closed_if_failing(stream):
        with in_their_words():
            if not speaking.asked.shown.stream:
                whole = await while_there(request, _whole(speaking, stream))
                return JSONResponse({**whole, **about}, headers=dict(headers or {}))
            first = await begun(request, stream, first_seconds(speaking.asked.request))
        return EventStream(_chunks(speaking, stream, first, about), headers)


async def _chunks(
    speaking: Speaking, stream: AsyncGenerator[Told], first: asyncio.Future[Told], about: Mapping[str, Any]
) -> AsyncGenerator[bytes]:
    what = speaking.asked
    chunks = Chunks(heading(what.model), what.shown, about)
    try:
        if what.shown.usage is Usage.EVERY:
            chunks.count(speaking.usage())
        yield b"".join(chunks.opening(choice.index, choice.opens_thinking) for choice in speaking.choices)
        told = await first
        while True:
            if piece := _piece(chunks, speaking, told):
                yield piece
            told = await anext(stream)
    except StopAsyncIteration:
        if what.shown.usage is not Usage.FINISH:
            yield chunks.usage(speaking.usage())
        yield DONE
    except Exception as error:
        note(error)
        yield b"data: " + error_body(error) + b"\n\n" + DONE
    finally:
        await let_go(first, stream)


def _piece(chunks: Chunks, speaking: Speaking, told: Told) -> bytes:
    where = speaking.asked.shown.usage
    if where is Usage.EVERY:
        chunks.count(speaking.usage())
    if told.finished is None:
        return chunks.of(told, None)
    last = speaking.usage() if where is Usage.FINISH and speaking.finished else None
    return chunks.of(told, ending(speaking.choices[told.index]), last)


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
    return {**value, "usage": speaking.usage()}


def _prompt_ids(speaking: Speaking) -> dict[str, list[int]]:
    prompt = speaking.choices[0].utterance.prompt
    return {"prompt_token_ids": list(prompt.context_ids)} if speaking.asked.shown.token_ids else {}
