"""The route that reads a message aloud, also while it is being generated."""

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
from palaver.server.errors import log_unexpected
from palaver.server.state import ChatDep, StateDep
from palaver.store import ReplyStatus
from palaver.voice.audio_format import pcm, wav_header
from palaver.voice.base import SPEEDS, VoiceSettings
from palaver.voice.speech import Speech

routes = APIRouter(tags=["speech"])
_MEDIA_TYPE = "audio/wav"
_AUDIO_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"audio/wav": {"schema": {"type": "string", "format": "binary"}}}}
}


@routes.get("/messages/{id}/speech", response_class=Response, responses=_AUDIO_RESPONSE)
async def speech(id: str, chat: ChatDep, state: StateDep, voice: str = "", speed: float = 1.0) -> Response:
    """WAV, 24 kHz and mono, sent clause by clause as it is spoken. A reply that is being made is spoken as it comes, to
    its end. Thinking, calls and code are not spoken."""
    low, high = SPEEDS
    if not low <= speed <= high:
        raise BadParameter("speed", speed, f"must be from {low:g} to {high:g}")
    stored = await chat.message(id)
    spoken = Speech(await state.speakers.current(), VoiceSettings(voice, speed))
    if stored.reply is None or stored.reply.status is not ReplyStatus.RUNNING:
        spoken.feed("".join(part.text for part in stored.parts if isinstance(part, Text)))
        spoken.end()
        return AudioStream(_wav_chunks(spoken), _MEDIA_TYPE)
    return AudioStream(_speak_turn(chat, id, spoken), _MEDIA_TYPE)


async def _wav_chunks(speech: Speech) -> AsyncGenerator[bytes]:
    try:
        yield wav_header()
        async with aclosing(aiter(speech)) as clauses:
            async for clause in clauses:
                if len(clause.samples):
                    yield pcm(clause.samples)
    finally:
        speech.stop()


async def _speak_turn(chat: Chat, reply: str, speech: Speech) -> AsyncGenerator[bytes]:
    feeder = asyncio.create_task(_feed_turn(chat, reply, speech))
    try:
        async with aclosing(_wav_chunks(speech)) as chunks:
            async for chunk in chunks:
                yield chunk
    finally:
        feeder.cancel()
        with suppress(asyncio.CancelledError):
            await feeder


async def _feed_turn(chat: Chat, reply: str, speech: Speech) -> None:
    """Feeds the turn's answer into the speech, and ends the speech even if the turn fails."""
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
