"""Text to token ids and back, and what the template makes of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from palaver.chat.model import Model, text_size
from palaver.errors import BadParameter
from palaver.formats.base import RenderOptions
from palaver.generation import Prompt
from palaver.server.openai.answering import while_there
from palaver.server.openai.asking import check_model
from palaver.server.openai.conversing import messages_of, tools_of
from palaver.server.openai.fields import DetokenizeRequest, RenderRequest, TokenizeRequest
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.unknown import check_all
from palaver.server.settings import ServerSettings
from palaver.server.state import State, StateOf


def router() -> APIRouter:
    routes = APIRouter(tags=["Tokens"])

    @routes.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request, state: StateOf) -> Response:
        """The token ids of a text, or of a conversation as the model reads it."""
        return await _answer(_tokenized, body, request, state)

    @routes.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request, state: StateOf) -> Response:
        """The text of token ids, control tokens and all."""
        return await _answer(_detokenized, body, request, state)

    @routes.post("/v1/apply-template")
    async def apply_template(body: RenderRequest, request: Request, state: StateOf) -> Response:
        """The text that the model reads for a conversation, up to where its reply begins."""
        return await _answer(_rendered, body, request, state)

    return routes


async def _answer(
    work: Callable[[Any, Model, ServerSettings], dict[str, Any]], body: Any, request: Request, state: State
) -> Response:
    """In a thread for long work, written as JSON there too; not begun for a client that has left."""
    model = state.service.models.current()

    def answer() -> bytes:
        return json.dumps(work(body, model, state.settings), ensure_ascii=False).encode()

    content = await while_there(request, state.workers.run(answer))
    return Response(content, media_type="application/json")


def _tokenized(body: TokenizeRequest, model: Model, settings: ServerSettings) -> dict[str, Any]:
    check_all(body)
    check_model(body.model, model, settings)
    if (body.prompt is None) == (body.messages is None):
        raise BadParameter("prompt", body.prompt, "either a prompt or messages must be given")
    tokenizer = model.format.tokenizer
    if body.prompt is not None:
        most = settings.limits.tokenize_chars
        if len(body.prompt) > most:
            shown = f"{len(body.prompt)} characters"
            raise BadParameter("prompt", shown, f"at most {most} characters are tokenized at once")
        ids = [*(tokenizer.prefix if body.add_special_tokens else ()), *tokenizer.encode([body.prompt])]
    else:
        ids = list(_prompt(body, model, settings).context_ids)
    told = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.info.context_length}
    return {**told, "token_strs": [text_of(model, [one]) for one in ids]} if body.return_token_strs else told


def _detokenized(body: DetokenizeRequest, model: Model, settings: ServerSettings) -> dict[str, Any]:
    check_all(body)
    check_model(body.model, model, settings)
    return {"prompt": text_of(model, body.tokens)}


def _rendered(body: RenderRequest, model: Model, settings: ServerSettings) -> dict[str, Any]:
    check_all(body)
    check_model(body.model, model, settings)
    ids = _prompt(body, model, settings).context_ids
    return {"prompt": text_of(model, ids), "count": len(ids)}


def _prompt(body: TokenizeRequest | RenderRequest, model: Model, settings: ServerSettings) -> Prompt:
    variables = dict(body.chat_template_kwargs or {})
    known = {switch.name for switch in model.format.switches}
    for name, value in variables.items():
        if name not in known and not settings.any_variables:
            raise BadParameter(f"chat_template_kwargs.{name}", value, "is no switch of this model's template")
    effort = body.reasoning_effort if isinstance(body, RenderRequest) else None
    options = RenderOptions(thinking=body.enable_thinking, effort=effort, variables=variables, now=datetime.now())
    messages, tools = messages_of(body.messages or []), tools_of(body.tools, None, settings.limits.tools)
    model.check_size(text_size(messages, tools))
    with in_their_words():
        return model.format.render(messages, tools, options)


def text_of(model: Model, ids: Any) -> str:
    size = len(model.vocabulary)
    for token_id in ids:
        if not 0 <= token_id < size:
            raise BadParameter("tokens", token_id, f"token ids here go from 0 to {size - 1}")
    return b"".join(model.vocabulary[token_id] for token_id in ids).decode("utf-8", "replace")
