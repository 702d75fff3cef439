"""The model in use."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from palaver.server.admin import check_model_name
from palaver.server.auth import Admin
from palaver.server.conversations.dependencies import Mine
from palaver.server.state import StateOf
from palaver.wire.model import ModelCard
from palaver.wire.requests import Load

routes = APIRouter(tags=["model"])


@routes.get("/model")
async def model(chat: Mine) -> ModelCard:
    """The model in use, or on its way."""
    return ModelCard.of(await chat.model())


@routes.get("/models")
async def models(chat: Mine) -> list[str]:
    """The names of models that are at hand."""
    return list(await chat.models())


@routes.post("/model/load")
async def load(asked: Load, chat: Mine, state: StateOf, _: Admin) -> ModelCard:
    """Puts another model into use. Answers at once; running turns are parked and can be continued."""
    check_model_name(asked.name, state)
    return ModelCard.of(await chat.load(asked.name))


@routes.post("/model/unload")
async def unload(chat: Mine, _: Admin) -> ModelCard:
    return ModelCard.of(await chat.unload())


@routes.get("/model/ready")
async def ready(chat: Mine, wait: Annotated[float, Query(ge=0, le=60)] = 25.0) -> ModelCard:
    """Waits until the model can be talked to, `wait` seconds at most; then says how it stands."""
    try:
        async with asyncio.timeout(wait):
            return ModelCard.of(await chat.ready())
    except TimeoutError:
        return ModelCard.of(await chat.model())
