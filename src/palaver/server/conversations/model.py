"""Routes for the model in use: state, list, load, unload."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from palaver.chat.interface import ModelCard
from palaver.server.admin import check_model_name
from palaver.server.auth import AdminDep
from palaver.server.state import ChatDep, StateDep
from palaver.wire import LoadModelRequest

routes = APIRouter(tags=["model"])


@routes.get("/model")
async def model(chat: ChatDep) -> ModelCard:
    """The model in use, or on its way."""
    return await chat.model()


@routes.get("/models")
async def models(chat: ChatDep) -> list[str]:
    """The names of models that are at hand."""
    return list(await chat.models())


@routes.post("/model/load")
async def load(body: LoadModelRequest, chat: ChatDep, state: StateDep, _: AdminDep) -> ModelCard:
    """Puts another model into use. Answers at once; running turns are parked and can be continued."""
    check_model_name(body.name, state)
    return await chat.load_model(body.name)


@routes.post("/model/unload")
async def unload(chat: ChatDep, _: AdminDep) -> ModelCard:
    return await chat.unload_model()


@routes.get("/model/ready")
async def ready(chat: ChatDep, wait: Annotated[float, Query(ge=0, le=60)] = 25.0) -> ModelCard:
    """Waits until the model can be talked to, `wait` seconds at most; then says how it stands."""
    try:
        async with asyncio.timeout(wait):
            return await chat.wait_until_ready()
    except TimeoutError:
        return await chat.model()
