"""Presets: what a user likes to set for conversations, under names. The page and the terminal share them."""

from __future__ import annotations

from fastapi import APIRouter

from palaver.server.conversations.owned import Mine
from palaver.wire.conversations import Preset
from palaver.wire.requests import DeletePreset, SavePreset

routes = APIRouter(tags=["presets"])


@routes.get("/presets")
async def presets(chat: Mine) -> list[Preset]:
    """By name."""
    return [Preset.of(preset) for preset in await chat.presets()]


@routes.put("/presets")
async def save(asked: SavePreset, chat: Mine) -> Preset:
    """In place of one of that name."""
    return Preset.of(await chat.save_preset(asked.name, asked.system, asked.parameters))


@routes.post("/presets/delete", status_code=204)
async def delete(asked: DeletePreset, chat: Mine) -> None:
    """A name may hold anything, so it is no part of a path."""
    await chat.delete_preset(asked.name)
