"""Words and their sound as one stream."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from palaver.events import AnswerDelta
from palaver.server.openai.audio import AudioRecording, TranscriptIndex
from palaver.server.openai.choices import ChoiceDelta
from palaver.server.openai.request import OutputOptions
from palaver.server.state import ServerState
from palaver.voice.audio_format import encode_audio, pcm
from palaver.voice.base import Samples, Speaker, silence
from palaver.voice.speech import Speech

_Arrivals = asyncio.Queue[ChoiceDelta | Exception | None]


@dataclass
class SpokenChoice:
    """One reply that is spoken. In a stream its sound comes between its words, else with its end, all of it."""

    speaker: Speaker
    recording: AudioRecording
    streams: bool
    owner: str
    transcripts: TranscriptIndex
    _said: list[str] = field(default_factory=list)
    _sounds: list[Samples] = field(default_factory=list)
    _last: ChoiceDelta | None = None

    def __post_init__(self) -> None:
        self._speech = Speech(self.speaker, self.recording.voice)
        self._arrivals: _Arrivals = asyncio.Queue()

    async def of(self, stream: AsyncGenerator[ChoiceDelta]) -> AsyncGenerator[ChoiceDelta]:
        """The reply's own end comes when all has been said."""
        tasks = (asyncio.create_task(self._read(stream)), asyncio.create_task(self._sound()))
        try:
            while (arrival := await self._arrivals.get()) is not None:
                if isinstance(arrival, Exception):
                    raise arrival
                yield arrival
            if self._last is not None:
                self.transcripts.keep(self.owner, self.recording, "".join(self._said))
                yield replace(self._last, sound=await self._whole())
        finally:
            self._speech.stop()
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
            await stream.aclose()

    async def _read(self, stream: AsyncGenerator[ChoiceDelta]) -> None:
        try:
            async for told in stream:
                for event in told.events:
                    if isinstance(event, AnswerDelta):
                        self._said.append(event.text)
                        self._speech.feed(event.text)
                if told.finished is not None:
                    self._last = replace(told, events=())
                    told = ChoiceDelta(told.index, told.events)
                self._arrivals.put_nowait(told)
            self._speech.end()
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _sound(self) -> None:
        try:
            async with aclosing(aiter(self._speech)) as pieces:
                async for piece in pieces:
                    if not len(piece.samples):
                        continue
                    if self.streams:
                        self._arrivals.put_nowait(ChoiceDelta(0, sound=_text(pcm(piece.samples))))
                    else:
                        self._sounds.append(piece.samples)
            self._arrivals.put_nowait(None)
        except Exception as error:
            self._arrivals.put_nowait(error)

    async def _whole(self) -> str:
        if self.streams:
            return ""
        samples = np.concatenate(self._sounds) if self._sounds else silence()
        return _text(await asyncio.to_thread(encode_audio, samples, self.recording.form))


async def spoken_choice(shown: OutputOptions, owner: str, state: ServerState) -> SpokenChoice | None:
    """None where the reply is text alone. Raises where what is asked for can't be spoken."""
    if shown.audio is None:
        return None
    speaker = await state.speakers.current()
    return SpokenChoice(speaker, shown.audio, shown.stream, owner, state.transcripts)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
