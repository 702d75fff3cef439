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
from palaver.server.anthropic.request import NAMES, ignored_of, parse_conversation, to_chat_request
from palaver.server.anthropic.schemas import MessagesRequest
from palaver.server.anthropic.streaming import (
    PING,
    ContentBlocks,
    Event,
    anthropic_stop_reason,
    fold_message,
    message_end,
    message_start,
    stream_response,
)
from palaver.server.openai.choices import ChoiceDelta, ChoiceUsage
from palaver.server.openai.disconnect import run_while_connected
from palaver.server.openai.history import StoredRequest, begin_replies, choice_parameters
from palaver.server.openai.request import OutputOptions
from palaver.server.openai.sampling_params import api_field_names, ignored_header
from palaver.server.openai.stored import HEADER, stored_choices
from palaver.server.state import ServerState


async def answer_in_conversation(
    request: Request, body: MessagesRequest, name: str, owner: str, state: ServerState
) -> Response:
    """Thoughts are not signed here: the conversation has their tokens."""
    chat, model = state.service.chat(owner), state.service.models.current()
    with api_field_names(NAMES):
        said, going_on = parse_conversation(body, model, state.settings)
        if going_on is not None:
            raise BadParameter("messages", "assistant", "a begun reply does not go with a conversation: see /api/turns")
        wishes = to_chat_request(body, model)
        messages = [turn.message for turn in said]
        key = request.headers.get("idempotency-key")
        place = await begin_replies(chat, model, choice_parameters(wishes, model, state), messages, name, state, key)
        speaking = await stored_choices(state, chat, model, place, OutputOptions())
    shows = wishes.include_reasoning is not False
    stream = speaking.tell()
    headers = {HEADER: place.conversation, **ignored_header(ignored_of(body, model, state.settings))}
    opens_in = speaking.choices[0].utterance.phase
    events = _events(body, model.name, place, stream, shows, opens_in)
    if body.stream:
        return stream_response(events, request, headers)
    return JSONResponse(await run_while_connected(request, fold_message(events)), headers=headers)


async def _events(
    body: MessagesRequest,
    model: str,
    place: StoredRequest,
    stream: AsyncGenerator[ChoiceDelta],
    shows: bool,
    opens_in: Phase,
) -> AsyncGenerator[Event]:
    blocks = ContentBlocks(shows_thinking=shows)
    last: Finished | None = None
    async with aclosing(stream):
        yield message_start(model, ChoiceUsage(), place.value())
        for event in blocks.open(opens_in):
            yield event
        yield PING
        async for told in stream:
            for event in blocks.take(told.events):
                yield event
            last = told.finished or last
        for event in (*blocks.close(), *message_end(_ending(last, blocks, body), _totals(last), blocks.notices)):
            yield event


def _ending(last: Finished | None, blocks: ContentBlocks, body: MessagesRequest) -> tuple[str, str | None]:
    full = last is not None and last.finish is Finish.LENGTH and last.usage.reply_tokens < body.max_tokens
    return anthropic_stop_reason(last, blocks.calls, full, body.stop_sequences or ())


def _totals(last: Finished | None) -> ChoiceUsage:
    counted = last.usage if last is not None else Usage()
    return ChoiceUsage(counted.prompt_tokens, counted.cached_tokens, counted.reply_tokens, counted.thinking_tokens)
