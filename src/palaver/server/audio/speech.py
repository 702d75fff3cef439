"""`/v1/audio/speech`: a text read aloud, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from palaver.errors import BadParameter
from palaver.server.auth import Whoever
from palaver.server.errors import OtherModel
from palaver.server.openai.disconnect import close_on_failure, run_while_connected
from palaver.server.openai.sampling_params import check_nested_fields
from palaver.server.openai.schemas import RequestFields, VoiceReference
from palaver.server.sse import EventStream
from palaver.server.state import ServerState, StateOf
from palaver.voice.audio_format import AudioFormat, audio_format, encode_audio, join_audio, pcm, wav_header
from palaver.voice.base import Samples, Speaker, VoiceSettings
from palaver.voice.speech import Speech


class AudioStream(EventStream):
    """Ends at once when its client leaves. Between two pieces nothing is sent: it would be heard."""

    def __init__(self, pieces: AsyncGenerator[bytes], media_type: str) -> None:
        self.media_type = media_type
        super().__init__(pieces, {"cache-control": "no-store"}, quiet=b"")


LONGEST = 20_000
"""Characters of one text; more of them are sent one after another."""
_THEIRS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
"""The models that OpenAI's clients name; here they are whatever speaks."""
_SOUND = {"schema": {"type": "string", "format": "binary"}}


class SpeechRequest(RequestFields):
    input: str = Field(description="The text; Markdown is not read out, nor is code.")
    model: str | None = Field(None, description="The server's voice; the names of OpenAI's models mean the same.")
    voice: str | VoiceReference | None = Field(None, description="One of its voices: see GET /v1/audio/voices.")
    response_format: str = Field("mp3", description="wav, pcm, flac, mp3 or opus.")
    speed: float = 1.0
    stream: bool | None = Field(None, description="Whether sound is sent as it is made: wav and pcm.")
    stream_format: Literal["audio", "sse"] | None = Field(None, description="sse: as events that hold base64.")
    instructions: Literal[""] | None = Field(None, description="Not supported.")


def router() -> APIRouter:
    routes = APIRouter(tags=["Audio"])

    @routes.post(
        "/v1/audio/speech",
        response_class=Response,
        responses={200: {"content": {"audio/*": _SOUND, "text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def speech(request: Request, body: SpeechRequest, caller: Whoever, state: StateOf) -> Response:
        """The text as sound, 24 kHz and mono; whole, or clause by clause as it is spoken."""
        check_nested_fields(body)
        wanted = _form(body)
        speaker = await state.speakers.current()
        _check(body, speaker)
        said = Speech(speaker, VoiceSettings(voice_name(body.voice), body.speed))
        said.feed(body.input)
        said.end()
        return await _answered(request, body, wanted, _sounds(state, caller.owner_id, said))

    @routes.get("/v1/audio/voices")
    async def voices(caller: Whoever, state: StateOf) -> dict[str, str | list[str]]:
        """What speaks here, and the voices it has."""
        speaker = await state.speakers.current()
        return {"model": speaker.name, "voices": list(speaker.voices)}

    return routes


def voice_name(voice: str | VoiceReference | None) -> str:
    return voice.id if isinstance(voice, VoiceReference) else voice or ""


def _form(body: SpeechRequest) -> AudioFormat:
    wanted = audio_format(body.response_format)
    if (body.stream or body.stream_format == "sse") and not wanted.streams:
        raise BadParameter("response_format", body.response_format, "only wav and pcm can be streamed")
    return wanted


def _check(body: SpeechRequest, speaker: Speaker) -> None:
    if body.model and body.model not in (*_THEIRS, speaker.name):
        raise OtherModel(f"The voice {body.model[:200]!r} is not the one in use, which is {speaker.name!r}.")
    if len(body.input) > LONGEST:
        raise BadParameter("input", f"{len(body.input)} characters", f"at most {LONGEST} are taken")
    if not body.input.strip():
        raise BadParameter("input", body.input[:80], "there is nothing to say")


async def _sounds(state: ServerState, owner: str, speech: Speech) -> AsyncGenerator[Samples]:
    try:
        with state.floor.taken(owner, speech.stop):
            async with aclosing(aiter(speech)) as pieces:
                async for piece in pieces:
                    yield piece.samples
    finally:
        speech.stop()


async def _answered(
    request: Request, body: SpeechRequest, wanted: AudioFormat, sounds: AsyncGenerator[Samples]
) -> Response:
    """Waits for the first sound, so that what can't be said has a status of its own."""
    async with close_on_failure(sounds):
        if not body.stream and body.stream_format != "sse":
            whole = await run_while_connected(request, join_audio(sounds))
            return Response(await asyncio.to_thread(encode_audio, whole, wanted), media_type=wanted.media_type)
        first = await run_while_connected(request, anext(sounds))
    pieces = _streamed(sounds, first, wanted)
    if body.stream_format == "sse":
        return EventStream(_events(pieces))
    return AudioStream(pieces, wanted.media_type)


async def _streamed(sounds: AsyncGenerator[Samples], first: Samples, wanted: AudioFormat) -> AsyncGenerator[bytes]:
    async with aclosing(sounds):
        yield (wav_header() if wanted.name == "wav" else b"") + pcm(first)
        async for samples in sounds:
            if len(samples):
                yield pcm(samples)


async def _events(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    yield _event({"type": "speech.audio.done", "usage": usage})


def _event(value: dict[str, object]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
