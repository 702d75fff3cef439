"""Chat requests that name a conversation: the new messages and the reply are stored there.

A client may send the whole history, as OpenAI's clients do, or only its new message. The history is matched with the
conversation's tree from the root; messages that do not match start a branch. A single message is appended at the
head. The turn belongs to the server: it continues when the client disconnects."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from palaver.chat.interface import ServerChat
from palaver.chat.model import Model
from palaver.chat.reply_request import PartialReply
from palaver.messages import Message
from palaver.server.metrics import Metrics
from palaver.server.openai.audio import spoken_choice
from palaver.server.openai.choices import CompletionStream
from palaver.server.openai.history import StoredRequest, choice_parameters, start_replies
from palaver.server.openai.messages import parse_history
from palaver.server.openai.request import (
    CONVERSATION_HEADER,
    ChatCall,
    OutputOptions,
    api_field_names,
    check_model,
    check_nested_fields,
    ignored_header,
    ignored_request_fields,
    output_options,
)
from palaver.server.openai.schemas import ChatRequest
from palaver.server.openai.streaming import respond
from palaver.server.state import ServerState


async def answer_in_conversation(
    request: Request, body: ChatRequest, name: str, owner: str, state: ServerState
) -> Response:
    chat, model = state.service.chat(owner), state.service.models.current()
    key, output = request.headers.get("idempotency-key"), output_options(body)
    with api_field_names():
        check_nested_fields(body)
        check_model(body.model, model, state.settings)
        history = parse_history(body, state.settings.limits.messages)
        spoken = None
        if output.audio is not None:
            spoken = await spoken_choice(output.audio, output.stream, owner, state)
        partial = None
        if history.partial is not None:
            partial = PartialReply(history.partial, history.partial_ids or ())
        parameters, reuse = choice_parameters(body, model, state), body.continue_final_message in (None, True)
        stored = await start_replies(chat, model, parameters, history.messages, name, key, partial, reuse)
        raw = body.reasoning_format == "none"
        completion = await stored_choices(chat, model, stored, output, raw, history.partial)
    deltas = completion.deltas() if spoken is None else spoken.with_audio(completion.deltas())
    ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
    headers = {CONVERSATION_HEADER: stored.conversation, **ignored}
    return await respond(request, completion, deltas, stored.value(), headers)


async def stored_choices(
    chat: ServerChat,
    model: Model,
    stored: StoredRequest,
    output: OutputOptions,
    raw: bool = False,
    partial: Message | None = None,
) -> CompletionStream:
    """The stored replies as the choices of a completion. Metrics of turns are counted elsewhere."""
    reply_streams = [await chat.reply_stream(reply, raw=raw) for reply in stored.replies]
    call = ChatCall(model, reply_streams[0].request, len(reply_streams), output, partial)
    return CompletionStream(call, reply_streams, Metrics())
