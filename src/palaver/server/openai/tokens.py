"""Text to token ids and back, and what the template makes of a conversation."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from fastapi import APIRouter

from palaver.chat.model import Model
from palaver.errors import BadParameter
from palaver.formats.options import Options
from palaver.generation import Prompt
from palaver.server.openai.asking import check_model
from palaver.server.openai.conversing import messages_of, tools_of
from palaver.server.openai.fields import DetokenizeRequest, RenderRequest, TokenizeRequest
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.unknown import check_all
from palaver.server.settings import ServerSettings
from palaver.server.state import StateOf


def router() -> APIRouter:
    routes = APIRouter(tags=["Tokens"])

    @routes.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest, state: StateOf) -> dict[str, Any]:
        """The token ids of a text, or of a conversation as the model reads it."""
        return await asyncio.to_thread(_tokenized, body, state.service.models.current(), state.settings)

    @routes.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest, state: StateOf) -> dict[str, Any]:
        """The text of token ids, control tokens and all."""
        check_all(body)
        model = state.service.models.current()
        check_model(body.model, model, state.settings)
        return {"prompt": text_of(model, body.tokens)}

    @routes.post("/v1/apply-template")
    async def apply_template(body: RenderRequest, state: StateOf) -> dict[str, Any]:
        """The text that the model reads for a conversation, up to where its reply begins."""
        return await asyncio.to_thread(_rendered, body, state.service.models.current(), state.settings)

    return routes


def _tokenized(body: TokenizeRequest, model: Model, settings: ServerSettings) -> dict[str, Any]:
    check_all(body)
    check_model(body.model, model, settings)
    if (body.prompt is None) == (body.messages is None):
        raise BadParameter("prompt", body.prompt, "either a prompt or messages must be given")
    tokenizer = model.format.tokenizer
    if body.prompt is not None:
        ids = [*(tokenizer.prefix if body.add_special_tokens else ()), *tokenizer.encode([body.prompt])]
    else:
        ids = list(_prompt(body, model, settings).context_ids)
    told = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.info.context_length}
    return {**told, "token_strs": [text_of(model, [one]) for one in ids]} if body.return_token_strs else told


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
    options = Options(thinking=body.enable_thinking, effort=effort, variables=variables, now=datetime.now())
    messages = messages_of(body.messages or [])
    with in_their_words():
        return model.format.render(messages, tools_of(body.tools, None, settings.limits.tools), options)


def text_of(model: Model, ids: Any) -> str:
    size = len(model.vocabulary)
    for token_id in ids:
        if not 0 <= token_id < size:
            raise BadParameter("tokens", token_id, f"token ids here go from 0 to {size - 1}")
    return b"".join(model.vocabulary[token_id] for token_id in ids).decode("utf-8", "replace")
