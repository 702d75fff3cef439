"""The speech of one answer in the making: text goes in as it streams, sound comes out clause by clause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from palaver.voice.base import RATE, Samples, Speaker, VoiceSettings, silence
from palaver.voice.clauses import ClauseSplitter, ClauseText
from palaver.voice.text_normalization import language_of, spoken_words


@dataclass(frozen=True, slots=True)
class SpokenClause:
    text: str
    """As the answer has it: the texts of all clauses joined are the answer."""
    words: str
    """What is said; empty where there is nothing to say, as of code."""
    language: str


class Narration:
    def __init__(self, language: str = "en") -> None:
        """`language`: what is assumed where the letters tell nothing."""
        self._language = language
        self._splitter = ClauseSplitter()

    def feed(self, text: str) -> list[SpokenClause]:
        """The clauses that this text made whole."""
        return [self._clause(piece) for piece in self._splitter.feed(text)]

    def close(self) -> list[SpokenClause]:
        return [self._clause(piece) for piece in self._splitter.close()]

    def _clause(self, piece: ClauseText) -> SpokenClause:
        language = language_of(piece.text, self._language)
        said = "" if piece.is_code else spoken_words(piece.text, language, piece.begins_line)
        return SpokenClause(piece.text, said, language)


_PAUSES = {**dict.fromkeys(".!?…。！？", 0.29), **dict.fromkeys(":;；：", 0.22), **dict.fromkeys(",，、—–", 0.14)}
_LINE_PAUSE = 0.29
"""Seconds of silence after a clause, as espeak itself makes them between clauses."""

_AT_ONCE = 1000
"""Characters that are put into words at once, so that a long text holds nothing else up."""


@dataclass(frozen=True, slots=True)
class SpokenAudio:
    """A clause and its sound, which is empty where there was nothing to say."""

    clause: SpokenClause
    samples: Samples


class Speech:
    """Whoever has the text feeds it; whoever wants the sound iterates, once. Neither waits for the other.

    The sound of all clauses joined is, sample for sample, what it would be if the text had come at once.
    """

    def __init__(self, speaker: Speaker, voice: VoiceSettings | None = None) -> None:
        """BadParameter where the speaker has no such voice."""
        self._speaker = speaker
        self._voice = voice or VoiceSettings()
        self._narration = Narration(speaker.language(self._voice))
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self._stopped = False

    def feed(self, text: str) -> None:
        """More of the answer, and of nothing else."""
        for at in range(0, len(text), _AT_ONCE):
            self._texts.put_nowait(text[at : at + _AT_ONCE])

    def end(self) -> None:
        """The answer is whole: what was fed is still said, then the sound ends."""
        self._texts.put_nowait(None)

    def stop(self) -> None:
        """Nobody listens any more: the clause that is being said is cut off, and the sound ends."""
        self._stopped = True
        self._texts.put_nowait(None)

    def __aiter__(self) -> AsyncGenerator[SpokenAudio]:
        return self._sound()

    async def _sound(self) -> AsyncGenerator[SpokenAudio]:
        try:
            async with aclosing(self._clauses()) as clauses:
                async for clause in clauses:
                    samples = await self._said(clause)
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

    async def _said(self, clause: SpokenClause) -> Samples:
        if not clause.words:
            return silence()
        asked = (clause.words, clause.language, self._voice, lambda: self._stopped)
        said = await asyncio.get_running_loop().run_in_executor(self._speaker.thread, self._speaker.say, *asked)
        rest = round(_pause(clause) / self._voice.speed * RATE)
        return np.concatenate([said, np.zeros(rest, dtype=np.float32)])


def _pause(clause: SpokenClause) -> float:
    if clause.text.endswith("\n"):
        return _LINE_PAUSE
    return next((_PAUSES[mark] for mark in reversed(clause.words[-3:]) if mark in _PAUSES), 0.0)


async def synthesize(text: str, speaker: Speaker, voice: VoiceSettings | None = None) -> AsyncGenerator[SpokenAudio]:
    """A text that is whole, said clause by clause."""
    speech = Speech(speaker, voice)
    speech.feed(text)
    speech.end()
    async for piece in speech:
        yield piece
