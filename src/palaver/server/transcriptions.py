"""Speech to text over HTTP: `/v1/audio/transcriptions` and `/v1/audio/translations` in OpenAI's format."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from palaver.errors import BadParameter, ShuttingDown
from palaver.server.auth import CallerDep
from palaver.server.errors import OtherModel, error_value, log_unexpected
from palaver.server.sse import EventStream, close_on_failure, encode_json, run_while_connected
from palaver.server.state import ServerState, StateDep
from palaver.voice.base import Samples
from palaver.voice.transcription import (
    TranscribedSound,
    Transcriber,
    TranscriptionOptions,
    Window,
    format_srt,
    format_vtt,
    join_windows,
)

_OPENAI_MODELS = ("whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe")
"""The model names of OpenAI's clients. They stand for the current transcriber."""
ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
_TIMED: tuple[ResponseFormat, ...] = ("srt", "verbose_json", "vtt")


class TranslationRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    file: UploadFile = Field(description="Sound, or a video with sound.")
    model: str = Field(description="The server's transcriber; names of OpenAI's models are accepted.")
    prompt: str = Field("", max_length=20_000, description="Text whose style and spelling the transcript follows.")
    response_format: ResponseFormat = "json"
    temperature: float = Field(0.0, ge=0.0, le=1.0)

    def options(self) -> TranscriptionOptions:
        return TranscriptionOptions("", self.prompt, self.temperature, True, self.response_format in _TIMED)


class TranscriptionRequest(TranslationRequest):
    language: str = Field("", max_length=20, description="The language that is spoken, such as en.")
    stream: bool = Field(False, description="Whether the text is sent as events, as it is transcribed.")
    granularities: list[Literal["segment", "word"]] = Field(
        [], alias="timestamp_granularities[]", description="With verbose_json: segment (the default), word, or both."
    )
    chunking_strategy: Literal["", "auto"] = Field("", description="Long sound is always divided at quiet places.")

    def options(self) -> TranscriptionOptions:
        timed = self.response_format in _TIMED
        words = "word" in self.granularities
        return TranscriptionOptions(self.language.lower(), self.prompt, self.temperature, False, timed, words)


_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The text.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/plain": {"schema": {"type": "string"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


def router() -> APIRouter:
    routes = APIRouter(tags=["Audio"])

    @routes.post("/v1/audio/transcriptions", response_class=Response, responses=_CONTENT)
    async def transcriptions(
        request: Request,
        body: Annotated[TranscriptionRequest, Form(media_type="multipart/form-data")],
        caller: CallerDep,
        state: StateDep,
    ) -> Response:
        """Transcribes speech; whole, or as a stream, window by window."""
        if body.granularities and body.response_format != "verbose_json":
            named = body.granularities[0]
            raise BadParameter("timestamp_granularities", named, "needs the response_format verbose_json")
        if body.stream and body.response_format not in ("json", "text"):
            raise BadParameter("response_format", body.response_format, "can't be streamed: use json")
        job = await _start(request, body, state, caller.owner_id)
        if not body.stream:
            without_segments = body.granularities == ["word"]
            return await job.respond(request, body.response_format, without_segments)
        windows = job.windows()
        async with close_on_failure(windows):
            first = await run_while_connected(request, anext(windows, Window(())))
        return EventStream(job.events(first, windows))

    @routes.post("/v1/audio/translations", response_class=Response, responses=_CONTENT)
    async def translations(
        request: Request,
        body: Annotated[TranslationRequest, Form(media_type="multipart/form-data")],
        caller: CallerDep,
        state: StateDep,
    ) -> Response:
        """Translates speech into English text."""
        job = await _start(request, body, state, caller.owner_id)
        return await job.respond(request, body.response_format)

    return routes


async def _start(request: Request, body: TranslationRequest, state: ServerState, owner: str) -> TranscriptionJob:
    """Raises for what the transcriber can't do, before the file is decoded."""
    transcriber = state.service.transcriber
    if body.model not in (*_OPENAI_MODELS, transcriber.name):
        raise OtherModel(
            f"The transcriber {body.model[:200]!r} is not loaded; the current one is {transcriber.name!r}."
        )
    options = body.options()
    info = await run_while_connected(request, transcriber.check(options))
    decode = partial(state.service.media.sound, await body.file.read(), info.sample_rate, body.file.filename or "file")
    return TranscriptionJob(state, owner, transcriber, decode, options, info.sample_rate)


class TranscriptionJob:
    """One transcription, which takes a place among the replies that run."""

    def __init__(
        self,
        state: ServerState,
        owner: str,
        transcriber: Transcriber,
        decode: Callable[[], Samples],
        options: TranscriptionOptions,
        sample_rate: int,
    ) -> None:
        """`decode` blocks, and returns the sound."""
        self._state = state
        self._owner = owner
        self._transcriber = transcriber
        self._decode = decode
        self._options = options
        self._sample_rate = sample_rate
        self._seconds = 0.0
        self._stopped = False

    async def windows(self) -> AsyncGenerator[Window]:
        with self._state.limiter.acquire(self._owner, self._stop):
            async with self._transcriber.places:
                samples = await asyncio.to_thread(self._decode)
                self._seconds = len(samples) / self._sample_rate
                async with aclosing(self._transcriber.windows(samples, self._options)) as windows:
                    async for window in windows:
                        if self._stopped:
                            raise ShuttingDown
                        yield window

    async def respond(self, request: Request, format: ResponseFormat, without_segments: bool = False) -> Response:
        transcript = await run_while_connected(request, self._transcribe())
        match format:
            case "json":
                return JSONResponse({"text": transcript.text, "usage": _usage(transcript)})
            case "verbose_json":
                verbose = _verbose(transcript, self._options)
                left_out = {"segments"} if without_segments else set()
                return JSONResponse({name: value for name, value in verbose.items() if name not in left_out})
            case "text":
                return PlainTextResponse(transcript.text + "\n")
            case "srt":
                return PlainTextResponse(format_srt(transcript.segments))
            case "vtt":
                return PlainTextResponse(format_vtt(transcript.segments))

    async def events(self, first: Window, windows: AsyncGenerator[Window]) -> AsyncGenerator[bytes]:
        """The events of OpenAI's stream: all deltas joined are the text."""
        found, sent = [first], ""
        async with aclosing(windows):
            try:
                yield self._delta(text := self._text(found), sent)
                async for window in windows:
                    found.append(window)
                    sent, text = text, self._text(found)
                    if text != sent:
                        yield self._delta(text, sent)
            except Exception as error:
                log_unexpected(error)
                yield encode_json({"type": "error", **error_value(error)})
                return
        yield encode_json({"type": "transcript.text.done", "text": text})

    async def _transcribe(self) -> TranscribedSound:
        async with aclosing(self.windows()) as windows:
            found = [window async for window in windows]
        return join_windows(found, self._options, self._seconds)

    def _text(self, windows: list[Window]) -> str:
        return join_windows(windows, self._options, self._seconds).text

    def _delta(self, text: str, sent: str) -> bytes:
        return encode_json({"type": "transcript.text.delta", "delta": text[len(sent) :]})

    def _stop(self) -> None:
        self._stopped = True


def _usage(transcript: TranscribedSound) -> dict[str, object]:
    return {"type": "duration", "seconds": math.ceil(transcript.seconds)}


def _verbose(transcript: TranscribedSound, options: TranscriptionOptions) -> dict[str, object]:
    segments = [
        {
            "id": number,
            "seek": 0,
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "text": segment.text,
            "tokens": list(segment.token_ids),
            "temperature": options.temperature,
        }
        for number, segment in enumerate(transcript.segments)
    ]
    return {
        "task": "translate" if options.translate else "transcribe",
        "language": transcript.language,
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
        "segments": segments,
        **({"words": _words(transcript)} if options.words else {}),
        "usage": _usage(transcript),
    }


def _words(transcript: TranscribedSound) -> list[dict[str, object]]:
    return [
        {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
        for segment in transcript.segments
        for word in segment.words
    ]
