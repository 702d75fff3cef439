"""Routes for the model in use: state, list, load, unload."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from palaver.server.admin import check_model_name
from palaver.server.auth import AdminDep
from palaver.server.conversations.dependencies import ChatDep
from palaver.server.state import StateDep
from palaver.wire.requests import LoadModelRequest
from palaver.wire.responses import ModelCardSchema

routes = APIRouter(tags=["model"])


@routes.get("/model")
async def model(chat: ChatDep) -> ModelCardSchema:
    """The model in use, or on its way."""
    return ModelCardSchema.from_value(await chat.model())


@routes.get("/models")
async def models(chat: ChatDep) -> list[str]:
    """The names of models that are at hand."""
    return list(await chat.models())


@routes.post("/model/load")
async def load(body: LoadModelRequest, chat: ChatDep, state: StateDep, _: AdminDep) -> ModelCardSchema:
    """Puts another model into use. Answers at once; running turns are parked and can be continued."""
    check_model_name(body.name, state)
    return ModelCardSchema.from_value(await chat.load_model(body.name))


@routes.post("/model/unload")
async def unload(chat: ChatDep, _: AdminDep) -> ModelCardSchema:
    return ModelCardSchema.from_value(await chat.unload_model())


@routes.get("/model/ready")
async def ready(chat: ChatDep, wait: Annotated[float, Query(ge=0, le=60)] = 25.0) -> ModelCardSchema:
    """Waits until the model can be talked to, `wait` seconds at most; then says how it stands."""
    try:
        async with asyncio.timeout(wait):
            return ModelCardSchema.from_value(await chat.wait_until_ready())
    except TimeoutError:
        return ModelCardSchema.from_value(await chat.model())
