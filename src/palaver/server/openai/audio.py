"""Spoken replies (`modalities: ["text", "audio"]`): the text deltas of a choice and their audio as one stream.

Only the answer is spoken, and its text becomes the transcript. Thinking and tool calls are sent as usual. Without a
voice, or if it fails, the text comes with a notice."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from palaver.errors import EngineError, ModelError
from palaver.events import AnswerDelta, Notice
from palaver.server.openai.request import AudioRecording, OutputOptions
from palaver.server.openai.streaming import ChoiceDelta
from palaver.server.state import ServerState, TranscriptIndex
from palaver.voice.audio_format import encode_audio, pcm
from palaver.voice.base import Samples, Speaker, silence
from palaver.voice.speech import Speech, not_spoken

AddVoice: TypeAlias = Callable[[AsyncGenerator[ChoiceDelta]], AsyncGenerator[ChoiceDelta]]
_Arrivals = asyncio.Queue[ChoiceDelta | Exception | None]


@dataclass
class SpokenChoice:
    """One spoken reply. A stream has audio deltas between the text deltas; else all audio comes with the end."""

    speaker: Speaker
    recording: AudioRecording
    streaming: bool
    owner: str
    transcripts: TranscriptIndex
    _transcript: list[str] = field(default_factory=list)
    _samples: list[Samples] = field(default_factory=list)
    _last: ChoiceDelta | None = None
    _failure: EngineError | None = None

    def __post_init__(self) -> None:
        self._speech = Speech(self.speaker, self.recording.voice)
        self._arrivals: _Arrivals = asyncio.Queue()
        self._text_ended = asyncio.Event()

    async def with_audio(self, stream: AsyncGenerator[ChoiceDelta]) -> AsyncGenerator[ChoiceDelta]:
        """The deltas of the stream and its audio. The end of the reply is held back until all audio was sent."""
        tasks = (asyncio.create_task(self._read_text(stream)), asyncio.create_task(self._read_audio()))
        try:
            while (arrival := await self._arrivals.get()) is not None:
                if isinstance(arrival, Exception):
                    raise arrival
                yield arrival
            if self._last is not None:
                recording, transcript = self.recording, "".join(self._transcript)
                self.transcripts.add(self.owner, recording.id, recording.expires_at, transcript)
                notices = () if self._failure is None else (Notice(not_spoken(self._failure)),)
                yield replace(self._last, events=notices, audio=await self._encoded_audio())
        finally:
            self._speech.stop()
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
            await stream.aclose()

    async def _read_text(self, stream: AsyncGenerator[ChoiceDelta]) -> None:
        try:
            async for delta in stream:
                for event in delta.events:
                    if isinstance(event, AnswerDelta):
                        self._transcript.append(event.text)
                        self._speech.feed(event.text)
                if delta.finished is not None:
                    self._last = replace(delta, events=())
                    delta = ChoiceDelta(delta.index, delta.events)
                self._arrivals.put_nowait(delta)
            self._speech.end()
            self._text_ended.set()
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _read_audio(self) -> None:
        try:
            async with aclosing(aiter(self._speech)) as pieces:
                async for piece in pieces:
                    if not len(piece.samples):
                        continue
                    if self.streaming:
                        self._arrivals.put_nowait(ChoiceDelta(0, audio=_base64(pcm(piece.samples))))
                    else:
                        self._samples.append(piece.samples)
            self._arrivals.put_nowait(None)
        except EngineError as error:
            self._failure = error
            await self._text_ended.wait()
            self._arrivals.put_nowait(None)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _encoded_audio(self) -> str:
        if self.streaming:
            return ""
        samples = np.concatenate(self._samples) if self._samples else silence()
        return _base64(await asyncio.to_thread(encode_audio, samples, self.recording.format))


async def voice_output(output: OutputOptions, owner: str, state: ServerState) -> tuple[OutputOptions, AddVoice]:
    """The output, and what adds the audio to its deltas. If no speaker can be loaded it is text, with a notice at its
    end. Raises BadParameter if the recording's voice is unknown."""
    if output.audio is None:
        return output, lambda deltas: deltas
    try:
        speaker = await state.speakers.current()
    except ModelError as error:
        return replace(output, audio=None), partial(_with_notice, notice=Notice(not_spoken(error)))
    return output, SpokenChoice(speaker, output.audio, output.stream, owner, state.transcripts).with_audio


async def _with_notice(stream: AsyncGenerator[ChoiceDelta], notice: Notice) -> AsyncGenerator[ChoiceDelta]:
    async with aclosing(stream):
        async for delta in stream:
            yield delta if delta.finished is None else replace(delta, events=(*delta.events, notice))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
