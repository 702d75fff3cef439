"""Requests that name a conversation: the messages and the reply are stored in it, as with a chat completion."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from palaver.errors import BadParameter
from palaver.server.anthropic.request import FIELD_NAMES, ignored_request_fields, parse_conversation, to_chat_request
from palaver.server.anthropic.schemas import MessagesRequest
from palaver.server.anthropic.streaming import AnthropicReply, fold_message, stream_response
from palaver.server.openai.history import choice_parameters, start_replies
from palaver.server.openai.request import CONVERSATION_HEADER, api_field_names, ignored_header, output_options
from palaver.server.openai.stored import stored_choices
from palaver.server.sse import run_while_connected
from palaver.server.state import ServerState


async def answer_in_conversation(
    request: Request, body: MessagesRequest, name: str, owner: str, state: ServerState
) -> Response:
    chat, model = state.service.chat(owner), state.service.models.current()
    with api_field_names(FIELD_NAMES):
        turns, partial = parse_conversation(body, model, state.settings)
        if partial is not None:
            raise BadParameter("messages", "assistant", "a begun reply does not go with a conversation: see /api/turns")
        chat_request = to_chat_request(body, model)
        parameters, messages = choice_parameters(chat_request, model, state), [turn.message for turn in turns]
        stored = await start_replies(chat, model, parameters, messages, name, request.headers.get("idempotency-key"))
        completion = await stored_choices(chat, model, stored, output_options(chat_request))
    ignored = ignored_header(ignored_request_fields(body, model, state.settings))
    headers = {CONVERSATION_HEADER: stored.conversation, **ignored}
    events = AnthropicReply(body, completion.choices[0], stored.value()).events(completion.deltas())
    if body.stream:
        return stream_response(events, request, headers)
    return JSONResponse(await run_while_connected(request, fold_message(events)), headers=headers)
