"""Spoken replies (`modalities: ["text", "audio"]`): the text deltas of a choice and their audio as one stream.

Only the answer is spoken, and its text becomes the transcript. Thinking and tool calls are sent as usual."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from palaver.events import AnswerDelta
from palaver.server.openai.request import AudioRecording
from palaver.server.openai.streaming import ChoiceDelta
from palaver.server.state import ServerState, TranscriptIndex
from palaver.voice.audio_format import encode_audio, pcm
from palaver.voice.base import Samples, Speaker, silence
from palaver.voice.speech import Speech

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

    def __post_init__(self) -> None:
        self._speech = Speech(self.speaker, self.recording.voice)
        self._arrivals: _Arrivals = asyncio.Queue()

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
                yield replace(self._last, audio=await self._encoded_audio())
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
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _encoded_audio(self) -> str:
        if self.streaming:
            return ""
        samples = np.concatenate(self._samples) if self._samples else silence()
        return _base64(await asyncio.to_thread(encode_audio, samples, self.recording.format))


async def spoken_choice(recording: AudioRecording, streaming: bool, owner: str, state: ServerState) -> SpokenChoice:
    """Raises where the recording's voice is unknown, or no speaker can be loaded."""
    return SpokenChoice(await state.speakers.current(), recording, streaming, owner, state.transcripts)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
