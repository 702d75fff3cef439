"""A request that names a conversation lands in it, as a chat completion does; its turn belongs to the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.errors import BadParameter
from palaver.events import Finished, Usage
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.server.anthropic.asking import as_chat, conversation, ignored_of
from palaver.server.anthropic.fields import MessagesRequest
from palaver.server.anthropic.naming import NAMES
from palaver.server.anthropic.streams import folded, streamed
from palaver.server.anthropic.telling import PING, Blocks, Event, ending, message_end, message_start
from palaver.server.openai.answering import while_there
from palaver.server.openai.asking import Shown
from palaver.server.openai.landing import HEADER, turns_told
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.placing import Landed, begin, wanted_of
from palaver.server.openai.speaking import Told, Totals
from palaver.server.openai.unknown import ignored_header
from palaver.server.state import State


async def landed(request: Request, body: MessagesRequest, name: str, owner: str, state: State) -> Response:
    """Thoughts are not signed here: the conversation has their tokens."""
    chat, model = state.service.chat(owner), state.service.models.current()
    with in_their_words(NAMES):
        said, going_on = conversation(body, model, state.settings)
        if going_on is not None:
            raise BadParameter("messages", "assistant", "a begun reply does not go with a conversation: see /api/turns")
        wishes = as_chat(body, model)
        messages = [turn.message for turn in said]
        key = request.headers.get("idempotency-key")
        place = await begin(chat, model, wanted_of(wishes, model, state), messages, name, state, key)
        speaking = await turns_told(state, chat, model, place, Shown())
    shows = wishes.include_reasoning is not False
    stream = speaking.tell()
    headers = {HEADER: place.conversation, **ignored_header(ignored_of(body, model, state.settings))}
    opens_in = speaking.choices[0].utterance.phase
    events = _events(body, model.name, place, stream, shows, opens_in)
    if body.stream:
        return streamed(events, request, headers)
    return JSONResponse(await while_there(request, folded(events)), headers=headers)


async def _events(
    body: MessagesRequest, model: str, place: Landed, stream: AsyncGenerator[Told], shows: bool, opens_in: Phase
) -> AsyncGenerator[Event]:
    blocks = Blocks(shows_thinking=shows)
    last: Finished | None = None
    async with aclosing(stream):
        yield message_start(model, Totals(), place.value())
        for event in blocks.open(opens_in):
            yield event
        yield PING
        async for told in stream:
            for event in blocks.take(told.events):
                yield event
            last = told.finished or last
        for event in (*blocks.close(), *message_end(_ending(last, blocks, body), _totals(last), blocks.notices)):
            yield event


def _ending(last: Finished | None, blocks: Blocks, body: MessagesRequest) -> tuple[str, str | None]:
    full = last is not None and last.finish is Finish.LENGTH and last.usage.reply_tokens < body.max_tokens
    return ending(last, blocks.calls, full, body.stop_sequences or ())


def _totals(last: Finished | None) -> Totals:
    counted = last.usage if last is not None else Usage()
    return Totals(counted.prompt_tokens, counted.cached_tokens, counted.reply_tokens, counted.thinking_tokens)
