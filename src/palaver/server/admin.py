"""Routes for operators: health, metrics, and the models."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from palaver import __version__
from palaver.chat.interface import ModelCard, ModelState
from palaver.client.discovery import MAX_NONCE, sign_nonce
from palaver.errors import BadParameter, ModelNotOffered, PalaverError
from palaver.server.anthropic.routes import model_value, models_page
from palaver.server.auth import AdminDep, CallerDep
from palaver.server.errors import NotSupported, error_body, speaks_anthropic
from palaver.server.metrics import ServerStatus
from palaver.server.settings import ServerSettings
from palaver.server.sse import EventStream, encode_sse
from palaver.server.state import ServerState, StateDep

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_POLL_SECONDS = 0.2
_STATISTICS_SECONDS = 1.0
_PROOF = (
    "if `nonce` was sent: the HMAC-SHA256, in hexadecimal digits, of `palaver health INSTANCE NONCE`; "
    "the key is the token in the server's data folder"
)


class Health(BaseModel):
    status: str = Field(
        description="ready: a reply can be made now; loading: a model loads or its engine starts again; failed: `note` "
        "says why; none: no model is loaded"
    )
    model: Annotated[str, Field(description="without a key, there are only `status`, `instance` and `proof`")] = ""
    progress: float | None = Field(None, description="from 0 to 1 while a model loads, where that is known")
    note: str = ""
    version: str = __version__
    instance: str = ""
    proof: Annotated[str, Field(description=_PROOF)] = ""


NonceQuery = Annotated[
    str,
    Query(max_length=MAX_NONCE, description="random characters: the server proves that it knows the token"),
]


def is_public(path: str) -> bool:
    """Whether the path needs no key, so that a server can be found and monitored without one."""
    return path in ("/health", "/ready")


class LoadRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str = Field(min_length=1, max_length=500)
    stream: bool = Field(False, description="whether progress comes as server-sent events")


class UnloadRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str = Field("", max_length=500)


def router() -> APIRouter:
    routes = APIRouter(tags=["Operation"])

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health(request: Request, state: StateDep, nonce: NonceQuery = "") -> Response:
        """Whether a reply can be generated now: 200, or 503 with the reason. Without a key, the status only."""
        now = await _current_health(state)
        status = 200 if now.status == ModelState.READY else 503
        identity = _identity(state.settings, nonce)
        value = now.model_dump(exclude={"proof"}) if request.state.caller is not None else {"status": now.status}
        return JSONResponse({**value, **identity}, status)

    @routes.get("/ready")
    async def ready(state: StateDep) -> Response:
        """Whether a load balancer may send requests here: 200, or 503 while the model, its engine or the database can't
        be used. It needs no key."""
        is_ready = (await _current_health(state)).status == ModelState.READY
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics(state: StateDep) -> Response:
        """Counts since the start, as Prometheus reads them."""
        return PlainTextResponse(await _metrics(state), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/v1/models")
    async def models(request: Request, state: StateDep) -> dict[str, Any]:
        """The model in use, then the other available ones and aliases. With the header `anthropic-version`, in
        Anthropic's format."""
        cards = await _cards(state)
        if speaks_anthropic(request.scope):
            return models_page(cards, request.query_params)
        return {"object": "list", "data": [_model(name, card) for name, card in cards.items()]}

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request, name: str, state: StateDep) -> dict[str, Any]:
        """One model."""
        cards = await _cards(state)
        if name not in cards:
            raise ModelNotOffered(name, list(cards))
        return (model_value if speaks_anthropic(request.scope) else _model)(name, cards[name])

    @routes.post("/v1/model/load", response_model=None)
    async def load(body: LoadRequest, caller: AdminDep, state: StateDep) -> Response:
        """Makes another model the one in use. The turns of other models go on."""
        check_model_name(body.model, state)
        state.service.models.load(body.model)
        if body.stream:
            return EventStream(_progress(state))
        await state.service.models.loaded()
        return JSONResponse(_health(state.service.models.card()).model_dump())

    @routes.post("/v1/model/unload")
    async def unload(caller: AdminDep, state: StateDep, body: UnloadRequest | None = None) -> Health:
        """Unloads all models; running turns are stopped and can be continued. With a name, unloads that model when
        its turns have ended."""
        await state.service.models.unload(body.model if body is not None else "")
        return _health(state.service.models.card())

    @routes.post("/v1/embeddings", include_in_schema=False)
    async def embeddings(caller: CallerDep) -> None:
        raise NotSupported("Embeddings are not supported: Palaver serves chat models.")

    return routes


def check_model_name(name: str, state: ServerState) -> None:
    """Raises BadParameter unless the model is available, or the operator allows others by their hub id."""
    if name in (*state.service.models.names, state.service.models.card().name):
        return
    if not state.settings.any_model or ".." in name or not _HUB_ID.fullmatch(name):
        available = ", ".join(state.service.models.names) or "none"
        raise BadParameter("model", name, f"is not available here (available: {available})")


async def _cards(state: ServerState) -> dict[str, ModelCard]:
    """The card of each name that can be asked for, aliases included."""
    models = state.service.models
    cards = {card.name: card for card in await models.describe()}
    default = models.card()
    own = {default.name: default} if default.name else {}
    known = {**own, **cards}
    aliases = dict.fromkeys(state.settings.aliases, default.name)
    aliases |= {name: target or default.name for name, target in models.catalog.aliases.items()}
    return {**own, **{name: known[target] for name, target in aliases.items() if target in known}, **known}


async def _progress(state: ServerState) -> AsyncGenerator[bytes]:
    models = state.service.models
    loading = asyncio.ensure_future(models.loaded())
    sent = None
    try:
        while not loading.done():
            if (now := _health(models.loading_card())) != sent:
                sent = now
                yield _event("progress", now.model_dump())
            await asyncio.wait({loading}, timeout=_POLL_SECONDS)
        loading.result()
        yield _event("ready", _health(models.card()).model_dump())
    except PalaverError as error:
        yield encode_sse(error_body(error), event="error")
    finally:
        loading.cancel()
        with suppress(asyncio.CancelledError, PalaverError):
            await loading


def _event(name: str, value: dict[str, Any]) -> bytes:
    return encode_sse(json.dumps(value).encode(), event=name)


async def _current_health(state: ServerState) -> Health:
    """The health of the engine and of the database: a reply needs both."""
    now = _health(state.service.models.card())
    if now.status != ModelState.READY or not (failure := await state.database_probe.failure(state.service.store)):
        return now
    return now.model_copy(update={"status": ModelState.FAILED.value, "progress": None, "note": failure})


def _identity(settings: ServerSettings, nonce: str) -> dict[str, str]:
    """The server's instance. For a nonce also the proof that it knows the token in its data folder."""
    identity = {"instance": settings.instance}
    if nonce and settings.secret:
        identity["proof"] = sign_nonce(settings.secret, settings.instance, nonce)
    return identity


def _health(card: ModelCard) -> Health:
    status = ModelState.READY if card.state is ModelState.AVAILABLE and card.context_length else card.state
    return Health(status=status.value, model=card.name, progress=card.progress, note=card.note)


async def _metrics(state: ServerState) -> str:
    ready = (await _current_health(state)).status == ModelState.READY
    replies, turns = len(state.limiter), len(state.service.turns.running)
    return state.metrics.text(ServerStatus(replies, turns, ready, await _engine_statistics(state)))


async def _engine_statistics(state: ServerState) -> dict[str, float]:
    """Empty if there is no engine, or it does not answer in time."""
    try:
        async with asyncio.timeout(_STATISTICS_SECONDS):
            return await state.service.models.metrics()
    except (PalaverError, TimeoutError):
        return {}


def _model(name: str, card: ModelCard) -> dict[str, Any]:
    about: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "palaver"}
    about["state"] = card.state.value
    if name != card.name:
        about["alias_of"] = card.name
    if not card.context_length:
        return about
    return {
        **about,
        "context_length": card.context_length,
        "max_model_len": card.context_length,
        "thinks": card.thinks,
        "takes_tools": card.takes_tools,
        "input_modalities": ["text", *card.media],
        "switches": [asdict(switch) for switch in card.switches],
        "reuse": card.reuse,
        "exactness": card.exactness,
        "steps": card.steps,
        "fingerprint": card.fingerprint,
        "lacks": card.lacks,
        "block_length": card.block_length,
    }
