"""Streaming speech of one answer: text goes in as it is generated, audio comes out clause by clause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from palaver.voice.base import SAMPLE_RATE, Samples, Speaker, VoiceSettings, silence
from palaver.voice.clauses import ClauseSplitter, ClauseText
from palaver.voice.text_normalization import detect_language, normalize_text


@dataclass(frozen=True, slots=True)
class SpokenClause:
    text: str
    """Verbatim: the texts of all clauses joined are the answer."""
    words: str
    """The words to speak; empty if there are none, as in code."""
    language: str


class Narration:
    """Splits an answer into clauses and normalizes their text for speech."""

    def __init__(self, language: str = "en") -> None:
        """`language` is the default, used where the script does not determine it."""
        self._language = language
        self._splitter = ClauseSplitter()

    def feed(self, text: str) -> list[SpokenClause]:
        """The clauses that this text completes."""
        return [self._clause(piece) for piece in self._splitter.feed(text)]

    def close(self) -> list[SpokenClause]:
        return [self._clause(piece) for piece in self._splitter.close()]

    def _clause(self, piece: ClauseText) -> SpokenClause:
        language = detect_language(piece.text, self._language)
        samples = "" if piece.is_code else normalize_text(piece.text, language, piece.begins_line)
        return SpokenClause(piece.text, samples, language)


_PAUSES = {**dict.fromkeys(".!?…。！？", 0.29), **dict.fromkeys(":;；：", 0.22), **dict.fromkeys(",，、—–", 0.14)}
_LINE_PAUSE = 0.29
"""Seconds of silence after a clause, the same as espeak's own."""

_FEED_CHARACTERS = 1000
"""Characters that are normalized at once, so that a long text does not block the event loop."""


@dataclass(frozen=True, slots=True)
class SpokenAudio:
    """A clause and its audio, which is empty if there are no words."""

    clause: SpokenClause
    samples: Samples


class Speech:
    """The producer calls `feed`, `end` and `stop`; one consumer iterates over the audio. Neither blocks the other.

    The audio of all clauses joined is, sample for sample, the same as if the text had been fed at once.
    """

    def __init__(self, speaker: Speaker, voice: VoiceSettings | None = None) -> None:
        """Raises BadParameter if the speaker has no such voice."""
        self._speaker = speaker
        self._voice = voice or VoiceSettings()
        self._narration = Narration(speaker.language(self._voice))
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self._stopped = False

    def feed(self, text: str) -> None:
        """Appends text of the answer."""
        for start in range(0, len(text), _FEED_CHARACTERS):
            self._texts.put_nowait(text[start : start + _FEED_CHARACTERS])

    def end(self) -> None:
        """The answer is complete: the audio ends after what was fed."""
        self._texts.put_nowait(None)

    def stop(self) -> None:
        """Cancels the current clause and ends the audio."""
        self._stopped = True
        self._texts.put_nowait(None)

    def __aiter__(self) -> AsyncGenerator[SpokenAudio]:
        return self._audio()

    async def _audio(self) -> AsyncGenerator[SpokenAudio]:
        try:
            async with aclosing(self._clauses()) as clauses:
                async for clause in clauses:
                    samples = await self._synthesize(clause)
                    if self._stopped:
                        return
                    yield SpokenAudio(clause, samples)
        finally:
            self._stopped = True

    async def _clauses(self) -> AsyncGenerator[SpokenClause]:
        while (text := await self._texts.get()) is not None and not self._stopped:
            for clause in self._narration.feed(text):
                yield clause
        for clause in () if self._stopped else self._narration.close():
            yield clause

    async def _synthesize(self, clause: SpokenClause) -> Samples:
        if not clause.words:
            return silence()
        arguments = (clause.words, clause.language, self._voice, lambda: self._stopped)
        samples = await asyncio.get_running_loop().run_in_executor(
            self._speaker.executor, self._speaker.synthesize, *arguments
        )
        pause_length = round(_pause(clause) / self._voice.speed * SAMPLE_RATE)
        return np.concatenate([samples, np.zeros(pause_length, dtype=np.float32)])


def _pause(clause: SpokenClause) -> float:
    if clause.text.endswith("\n"):
        return _LINE_PAUSE
    return next((_PAUSES[mark] for mark in reversed(clause.words[-3:]) if mark in _PAUSES), 0.0)


async def stream_speech(text: str, speaker: Speaker, voice: VoiceSettings | None = None) -> AsyncGenerator[SpokenAudio]:
    """The audio of a complete text, clause by clause."""
    speech = Speech(speaker, voice)
    speech.feed(text)
    speech.end()
    async for piece in speech:
        yield piece
