"""A message read aloud: one that is whole, or a reply while it is being made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter, Response

from palaver.chat.interface import Chat
from palaver.errors import BadParameter, PalaverError
from palaver.events import AnswerDelta, Failed, Finished, Snapshot
from palaver.messages import Text
from palaver.server.audio.speech import AudioStream
from palaver.server.conversations.dependencies import Mine
from palaver.server.errors import log_unexpected
from palaver.server.state import StateOf
from palaver.store import ReplyStatus
from palaver.voice.audio_format import pcm, wav_header
from palaver.voice.base import SPEEDS, VoiceSettings
from palaver.voice.speech import Speech

routes = APIRouter(tags=["speech"])
_TYPE = "audio/wav"
_SOUND: dict[int | str, dict[str, Any]] = {
    200: {"content": {"audio/wav": {"schema": {"type": "string", "format": "binary"}}}}
}


@routes.get("/messages/{id}/speech", response_class=Response, responses=_SOUND)
async def speech(id: str, chat: Mine, state: StateOf, voice: str = "", speed: float = 1.0) -> Response:
    """WAV, 24 kHz and mono, sent clause by clause as it is spoken. A reply that is being made is spoken as it comes, to
    its end. Thinking, calls and code are not spoken."""
    low, high = SPEEDS
    if not low <= speed <= high:
        raise BadParameter("speed", speed, f"must be from {low:g} to {high:g}")
    stored = await chat.message(id)
    said = Speech(await state.speakers.current(), VoiceSettings(voice, speed))
    if stored.reply is None or stored.reply.status is not ReplyStatus.RUNNING:
        said.feed("".join(part.text for part in stored.parts if isinstance(part, Text)))
        said.end()
        return AudioStream(_sounds(said), _TYPE)
    return AudioStream(_followed(chat, id, said), _TYPE)


async def _sounds(speech: Speech) -> AsyncGenerator[bytes]:
    try:
        yield wav_header()
        async with aclosing(aiter(speech)) as pieces:
            async for piece in pieces:
                if len(piece.samples):
                    yield pcm(piece.samples)
    finally:
        speech.stop()


async def _followed(chat: Chat, reply: str, speech: Speech) -> AsyncGenerator[bytes]:
    feeding = asyncio.create_task(_fed(chat, reply, speech))
    try:
        async with aclosing(_sounds(speech)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding


async def _fed(chat: Chat, reply: str, speech: Speech) -> None:
    """Whatever becomes of the turn, its speech has an end; who follows its events is told why."""
    try:
        async with chat.events(reply) as entries:
            async for entry in entries:
                match entry.event:
                    case AnswerDelta(text):
                        speech.feed(text)
                    case Snapshot(message):
                        speech.feed(message.text)
                    case Finished(tail=tail) | Failed(tail=tail):
                        for event in tail:
                            if isinstance(event, AnswerDelta):
                                speech.feed(event.text)
                    case _:
                        pass
    except PalaverError as error:
        log_unexpected(error)
    finally:
        speech.end()
