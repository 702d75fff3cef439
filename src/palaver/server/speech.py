"""Speech over HTTP: `/v1/audio/speech` in OpenAI's format, and messages that are read aloud."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from palaver.chat.interface import Chat
from palaver.errors import BadParameter, PalaverError
from palaver.events import AnswerDelta, Failed, Finished, Snapshot
from palaver.messages import Text
from palaver.server.auth import CallerDep
from palaver.server.errors import OtherModel, api_router, log_unexpected
from palaver.server.openai.request import check_nested_fields, voice_name
from palaver.server.openai.schemas import RequestFields, VoiceReference
from palaver.server.sse import EventStream, close_on_failure, encode_sse, run_while_connected
from palaver.server.state import ChatDep, ServerState, StateDep
from palaver.store import ReplyStatus
from palaver.voice.audio_format import AudioFormat, audio_format, encode_audio, join_audio, pcm, wav_header
from palaver.voice.base import SPEEDS, Samples, Speaker, VoiceSettings
from palaver.voice.speech import Speech


class AudioStream(EventStream):
    """An audio response that ends at once when the client disconnects. It has no keep-alive: that would be audible."""

    def __init__(self, chunks: AsyncGenerator[bytes], media_type: str) -> None:
        self.media_type = media_type
        super().__init__(chunks, {"cache-control": "no-store"}, keep_alive=b"")


MAX_CHARS = 20_000
"""Characters of one request."""
_OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
"""The model names of OpenAI's clients. They stand for the current speaker."""
_AUDIO_CONTENT = {"schema": {"type": "string", "format": "binary"}}


class SpeechRequest(RequestFields):
    input: str = Field(description="The text; Markdown is not read out, nor is code.")
    model: str | None = Field(None, description="The server's voice engine; names of OpenAI's models are accepted.")
    voice: str | VoiceReference | None = Field(None, description="One of its voices: see GET /v1/audio/voices.")
    response_format: str = Field("mp3", description="wav, pcm, flac, mp3 or opus.")
    speed: float = 1.0
    stream: bool | None = Field(None, description="Whether sound is sent while it is generated: wav and pcm.")
    stream_format: Literal["audio", "sse"] | None = Field(None, description="sse: as events that hold base64.")
    instructions: Literal[""] | None = Field(None, description="Not supported.")


def router() -> APIRouter:
    routes = APIRouter(tags=["Audio"])

    @routes.post(
        "/v1/audio/speech",
        response_class=Response,
        responses={200: {"content": {"audio/*": _AUDIO_CONTENT, "text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def speech(request: Request, body: SpeechRequest, caller: CallerDep, state: StateDep) -> Response:
        """The text as sound, 24 kHz and mono; whole, or clause by clause as it is spoken."""
        check_nested_fields(body)
        format = _response_format(body)
        speaker = await state.speakers.current()
        _check(body, speaker)
        speech = Speech(speaker, VoiceSettings(voice_name(body.voice), body.speed))
        speech.feed(body.input)
        speech.end()
        return await _respond(request, body, format, _samples(state, caller.owner_id, speech))

    @routes.get("/v1/audio/voices")
    async def voices(caller: CallerDep, state: StateDep) -> dict[str, str | list[str]]:
        """The voice engine and its voices."""
        speaker = await state.speakers.current()
        return {"model": speaker.name, "voices": list(speaker.voices)}

    return routes


def _response_format(body: SpeechRequest) -> AudioFormat:
    format = audio_format(body.response_format)
    if (body.stream or body.stream_format == "sse") and not format.streams:
        raise BadParameter("response_format", body.response_format, "only wav and pcm can be streamed")
    return format


def _check(body: SpeechRequest, speaker: Speaker) -> None:
    if body.model and body.model not in (*_OPENAI_MODELS, speaker.name):
        raise OtherModel(f"The voice {body.model[:200]!r} is not loaded; the current voice is {speaker.name!r}.")
    if len(body.input) > MAX_CHARS:
        raise BadParameter("input", f"{len(body.input)} characters", f"at most {MAX_CHARS} are taken")
    if not body.input.strip():
        raise BadParameter("input", body.input[:80], "contains nothing to speak")


async def _samples(state: ServerState, owner: str, speech: Speech) -> AsyncGenerator[Samples]:
    try:
        with state.limiter.acquire(owner, speech.stop):
            async with aclosing(aiter(speech)) as pieces:
                async for piece in pieces:
                    yield piece.samples
    finally:
        speech.stop()


async def _respond(
    request: Request, body: SpeechRequest, format: AudioFormat, samples: AsyncGenerator[Samples]
) -> Response:
    """Waits for the first samples, so that a failure has a status of its own."""
    async with close_on_failure(samples):
        if not body.stream and body.stream_format != "sse":
            audio = await run_while_connected(request, join_audio(samples))
            return Response(await asyncio.to_thread(encode_audio, audio, format), media_type=format.media_type)
        first = await run_while_connected(request, anext(samples))
    chunks = _encode_stream(samples, first, format)
    if body.stream_format == "sse":
        return EventStream(_events(chunks))
    return AudioStream(chunks, format.media_type)


async def _encode_stream(stream: AsyncGenerator[Samples], first: Samples, format: AudioFormat) -> AsyncGenerator[bytes]:
    async with aclosing(stream):
        yield (wav_header() if format.name == "wav" else b"") + pcm(first)
        async for samples in stream:
            if len(samples):
                yield pcm(samples)


async def _events(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(chunk).decode()})
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    yield _event({"type": "speech.audio.done", "usage": usage})


def _event(value: dict[str, object]) -> bytes:
    return encode_sse(json.dumps(value).encode())


message_speech_routes = api_router("speech")
_MEDIA_TYPE = "audio/wav"
_AUDIO_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"audio/wav": {"schema": {"type": "string", "format": "binary"}}}}
}


@message_speech_routes.get("/messages/{id}/speech", response_class=Response, responses=_AUDIO_RESPONSE)
async def speech(id: str, chat: ChatDep, state: StateDep, voice: str = "", speed: float = 1.0) -> Response:
    """WAV, 24 kHz and mono, sent clause by clause as it is spoken. A running reply is spoken while it is generated, to
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
