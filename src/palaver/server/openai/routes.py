"""`/v1/chat/completions`, and `/v1/tokenize`, `/v1/detokenize` and `/v1/apply-template`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from palaver.chat.model import Model, text_size
from palaver.chat.reply_stream import GeneratedReply
from palaver.errors import BadParameter
from palaver.formats.base import RenderOptions
from palaver.generation import Prompt
from palaver.server.auth import CallerDep
from palaver.server.openai.audio import AddVoice, voice_output
from palaver.server.openai.request import (
    ChatCall,
    api_field_names,
    check_nested_fields,
    conversation_name,
    ignored_header,
    ignored_request_fields,
    parse_messages,
    parse_request,
    parse_tools,
)
from palaver.server.openai.schemas import ChatRequest, DetokenizeRequest, RenderRequest, TokenizeRequest
from palaver.server.openai.stored import answer_in_conversation, conversation_model_name
from palaver.server.openai.streaming import ChatEncoder, CompletionStream, respond
from palaver.server.sse import answer_while_loading, run_while_connected
from palaver.server.state import ServerState, StateDep


def chat_router() -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest, caller: CallerDep, state: StateDep) -> Response:
        """A reply to the messages, whole or as a stream of server-sent events. If `metadata.conversation` (or the
        header `x-conversation`) names a conversation, both are stored there; `new` creates one."""
        state.transcripts.resolve(caller.owner_id, body.messages)
        name = conversation_name(body.metadata, request.headers)
        if name is None:
            answer = answer_chat(request, body, caller.owner_id, state)
            return await answer_while_loading(request, state, body.model, body.stream, answer)
        model = await conversation_model_name(state.service.chat(caller.owner_id), name, body.model)
        answer = answer_in_conversation(request, body, name, caller.owner_id, state)
        return await answer_while_loading(request, state, model, body.stream, answer)

    return routes


async def answer_chat(request: Request, body: ChatRequest, owner: str, state: ServerState) -> Response:
    model = await state.model(body.model)
    with api_field_names():
        call, reply_streams = await asyncio.to_thread(_prepare, body, model, owner, state)
        add_voice: AddVoice | None = None
        if call.output.audio is not None:
            output, add_voice = await voice_output(call.output, owner, state)
            call = replace(call, output=output)
        completion = CompletionStream(call, reply_streams, state.metrics, state.limiter, state.reply_index)
        deltas = add_voice(completion.deltas()) if add_voice else completion.deltas()
    ignored = ignored_header(ignored_request_fields(body, state.settings, model.format))
    return await respond(request, completion, deltas, ChatEncoder(completion), ignored)


def _prepare(body: ChatRequest, model: Model, owner: str, state: ServerState) -> tuple[ChatCall, list[GeneratedReply]]:
    attachments = state.attachments(model)
    call = parse_request(body, model, state.settings, owner, state.reply_index, attachments)
    return call, call.reply_streams()


def tokens_router() -> APIRouter:
    routes = APIRouter(tags=["Tokens"])

    @routes.post("/v1/tokenize", response_model=dict[str, Any])
    async def tokenize(body: TokenizeRequest, request: Request, state: StateDep) -> Response:
        """The token ids of a text, or of a rendered conversation."""
        return await _answer(_tokenize, body, request, state)

    @routes.post("/v1/detokenize", response_model=dict[str, Any])
    async def detokenize(body: DetokenizeRequest, request: Request, state: StateDep) -> Response:
        """The text of token ids, control tokens included."""
        return await _answer(_detokenize, body, request, state)

    @routes.post("/v1/apply-template", response_model=dict[str, Any])
    async def apply_template(body: RenderRequest, request: Request, state: StateDep) -> Response:
        """The prompt of a conversation as text, up to the start of the reply."""
        return await _answer(_apply_template, body, request, state)

    return routes


async def _answer(
    work: Callable[[Any, Model, ServerState], dict[str, Any]], body: Any, request: Request, state: ServerState
) -> Response:
    """Runs the work and encodes its result as JSON in a thread, unless the client disconnects before."""
    model = await state.model(body.model)

    def answer() -> bytes:
        return json.dumps(work(body, model, state), ensure_ascii=False, separators=(",", ":")).encode()

    content = await run_while_connected(request, state.workers.run(answer))
    return Response(content, media_type="application/json")


def _tokenize(body: TokenizeRequest, model: Model, state: ServerState) -> dict[str, Any]:
    check_nested_fields(body)
    if (body.prompt is None) == (body.messages is None):
        raise BadParameter("prompt", body.prompt, "either a prompt or messages must be given")
    tokenizer = model.format.tokenizer
    if body.prompt is not None:
        limit = state.settings.limits.tokenize_chars
        if len(body.prompt) > limit:
            size = f"{len(body.prompt)} characters"
            raise BadParameter("prompt", size, f"at most {limit} characters are tokenized at once")
        ids = [*(tokenizer.prefix if body.add_special_tokens else ()), *tokenizer.encode([body.prompt])]
    else:
        ids = list(_prompt(body, model, state).context_ids)
    value = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.info.context_length}
    return {**value, "token_strs": [decode_text(model, [one]) for one in ids]} if body.return_token_strs else value


def _detokenize(body: DetokenizeRequest, model: Model, state: ServerState) -> dict[str, Any]:
    check_nested_fields(body)
    return {"prompt": decode_text(model, body.tokens)}


def _apply_template(body: RenderRequest, model: Model, state: ServerState) -> dict[str, Any]:
    check_nested_fields(body)
    ids = _prompt(body, model, state).context_ids
    return {"prompt": decode_text(model, ids), "count": len(ids)}


def _prompt(body: TokenizeRequest | RenderRequest, model: Model, state: ServerState) -> Prompt:
    variables = dict(body.chat_template_kwargs or {})
    known = {switch.name for switch in model.format.switches}
    for name, value in variables.items():
        if name not in known and not state.settings.any_variables:
            raise BadParameter(f"chat_template_kwargs.{name}", value, "is not a variable of this model's template")
    effort = body.reasoning_effort if isinstance(body, RenderRequest) else None
    options = RenderOptions(thinking=body.enable_thinking, effort=effort, variables=variables, now=datetime.now())
    messages = parse_messages(body.messages or [], state.attachments(model))
    tools = parse_tools(body.tools, None, state.settings.limits.tools)
    model.check_size(text_size(messages, tools))
    with api_field_names():
        return model.render(messages, tools, options)


def decode_text(model: Model, ids: Any) -> str:
    size = len(model.vocabulary)
    for token_id in ids:
        if not 0 <= token_id < size:
            raise BadParameter("tokens", token_id, f"token ids go from 0 to {size - 1}")
    return b"".join(model.vocabulary[token_id] for token_id in ids).decode("utf-8", "replace")
