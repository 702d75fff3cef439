"""Requests that name a conversation: the messages and the reply are stored in it, as with a chat completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.errors import BadParameter
from palaver.events import Finished, Usage
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.server.anthropic.request import FIELD_NAMES, ignored_request_fields, parse_conversation, to_chat_request
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
from palaver.server.openai.history import StoredRequest, choice_parameters, start_replies
from palaver.server.openai.request import CONVERSATION_HEADER, OutputOptions, api_field_names, ignored_header
from palaver.server.openai.stored import stored_choices
from palaver.server.sse import run_while_connected
from palaver.server.state import ServerState


async def answer_in_conversation(
    request: Request, body: MessagesRequest, name: str, owner: str, state: ServerState
) -> Response:
    """Thinking is not signed: the conversation has its token ids."""
    chat, model = state.service.chat(owner), state.service.models.current()
    with api_field_names(FIELD_NAMES):
        turns, partial = parse_conversation(body, model, state.settings)
        if partial is not None:
            raise BadParameter("messages", "assistant", "a begun reply does not go with a conversation: see /api/turns")
        chat_request = to_chat_request(body, model)
        messages = [turn.message for turn in turns]
        key = request.headers.get("idempotency-key")
        stored = await start_replies(chat, model, choice_parameters(chat_request, model, state), messages, name, key)
        completion = await stored_choices(chat, model, stored, OutputOptions())
    shows_thinking = chat_request.include_reasoning is not False
    stream = completion.deltas()
    headers = {
        CONVERSATION_HEADER: stored.conversation,
        **ignored_header(ignored_request_fields(body, model, state.settings)),
    }
    initial_phase = completion.choices[0].reply_stream.opening.phase
    events = _events(body, model.name, stored, stream, shows_thinking, initial_phase)
    if body.stream:
        return stream_response(events, request, headers)
    return JSONResponse(await run_while_connected(request, fold_message(events)), headers=headers)


async def _events(
    body: MessagesRequest,
    model: str,
    stored: StoredRequest,
    stream: AsyncGenerator[ChoiceDelta],
    shows_thinking: bool,
    initial_phase: Phase,
) -> AsyncGenerator[Event]:
    blocks = ContentBlocks(shows_thinking=shows_thinking)
    last: Finished | None = None
    async with aclosing(stream):
        yield message_start(model, ChoiceUsage(), stored.value())
        for event in blocks.open(initial_phase):
            yield event
        yield PING
        async for delta in stream:
            for event in blocks.feed(delta.events):
                yield event
            last = delta.finished or last
        for event in (*blocks.close(), *message_end(_stop_reason(last, blocks, body), _usage(last), blocks.notices)):
            yield event


def _stop_reason(last: Finished | None, blocks: ContentBlocks, body: MessagesRequest) -> tuple[str, str | None]:
    context_full = last is not None and last.finish is Finish.LENGTH and last.usage.reply_tokens < body.max_tokens
    return anthropic_stop_reason(last, blocks.calls, context_full, body.stop_sequences or ())


def _usage(last: Finished | None) -> ChoiceUsage:
    usage = last.usage if last is not None else Usage()
    return ChoiceUsage(usage.prompt_tokens, usage.cached_tokens, usage.reply_tokens, usage.thinking_tokens)
