"""Streaming speech of one answer: text goes in as it is generated, is split into clauses, each as soon as it is
complete, and audio comes out clause by clause. The boundaries of clauses depend on the text alone, not on the chunks in
which it arrived. Speakers are loaded by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from palaver.voice.base import SAMPLE_RATE, Samples, Speaker, VoiceSettings, silence
from palaver.voice.espeak import Espeak
from palaver.voice.model_process import ModelSpeaker
from palaver.voice.text_normalization import detect_language, normalize_text

MAX_CLAUSE = 280
"""Characters after which a clause is split without punctuation."""
MIN_FIRST_CLAUSE, MIN_CLAUSE = 24, 80
"""Length from which a comma ends a clause. Short for the first clause, so that audio starts soon."""

_CLOSERS = r"[\"'”’»)\]}*_~`」』）】》]*"
_CUT = re.compile(
    rf"(?P<line>\n)|(?P<full>[。！？｡]+)|(?P<sentence>[.!?…]+{_CLOSERS}(?=\s))"
    rf"|(?P<pause>[,;:—–]{_CLOSERS}(?=\s)|[，；：、])"
)
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,}|~{3,}|\$\$)")
_MAYBE_FENCE = re.compile(r" {0,3}(?:`{0,2}|~{0,2}|\$?)")
_NUMBERED = re.compile(r"\s*(?:>\s*)*\d{1,3}\.")
_INITIAL = re.compile(r"(?:^|[\s.(])(?!I)[A-ZÀ-Þ]\.$")
_WORD = re.compile(r"([^\W\d_]+(?:\.[^\W\d_]+)*)\.$")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st mt vs e.g i.e cf ca approx fig figs vol pp al gen col sgt capt lt rev hon "
    "jan feb mar apr jun jul aug sep sept oct nov dec inc ltd corp bros a.m p.m u.s u.k u.n d.c ph.d "
    "z.b d.h bzw usw".split()
)


@dataclass(frozen=True, slots=True)
class ClauseText:
    """A clause of the answer, verbatim: all clauses joined are the answer."""

    text: str
    is_code: bool = False
    begins_line: bool = False


class ClauseSplitter:
    """Splits one answer: `feed` its text as it streams, then `close`."""

    def __init__(self) -> None:
        self._text = ""
        self._begins_line = True
        self._fence = ""
        """The fence that closes the open code block."""
        self._has_emitted = False

    def feed(self, text: str) -> list[ClauseText]:
        self._text += text
        return self._emit_clauses(final=False)

    def close(self) -> list[ClauseText]:
        """The remaining clauses, at the end of the text."""
        return self._emit_clauses(final=True)

    def _emit_clauses(self, final: bool) -> list[ClauseText]:
        clauses = []
        while self._text and (piece := self._next(final)) is not None:
            clauses.append(piece)
        return clauses

    def _next(self, final: bool) -> ClauseText | None:
        if self._fence:
            return self._code_line(final)
        if self._begins_line:
            if fence := _FENCE.match(self._text):
                return self._open_fence(fence["mark"], final)
            if _MAYBE_FENCE.fullmatch(self._text) and not final:
                return None
        end = self._find_end(final)
        return None if end is None else self._emit(end)

    def _emit(self, end: int, is_code: bool = False) -> ClauseText:
        piece = ClauseText(self._text[:end], is_code, self._begins_line)
        self._text = self._text[end:]
        self._begins_line = piece.text.endswith("\n")
        self._has_emitted = self._has_emitted or (not is_code and any(map(str.isalnum, piece.text)))
        return piece

    def _line_end(self, final: bool) -> int | None:
        """The end of the line, or None if it may not be complete."""
        position = self._text.find("\n")
        return position + 1 if position >= 0 else len(self._text) if final else None

    def _open_fence(self, mark: str, final: bool) -> ClauseText | None:
        end = self._line_end(final)
        if end is None:
            return None
        line = self._text[:end].strip()
        if not (mark == "$$" and line.count("$$") > 1):
            self._fence = mark
        return self._emit(end, is_code=True)

    def _code_line(self, final: bool) -> ClauseText | None:
        end = self._line_end(final)
        if end is None:
            return None
        line = self._text[:end].strip()
        if line.endswith("$$") if self._fence == "$$" else _closes_fence(line, self._fence):
            self._fence = ""
        return self._emit(end, is_code=True)

    def _find_end(self, final: bool) -> int | None:
        for cut in _CUT.finditer(self._text, 0, MAX_CLAUSE + 1):
            if cut.end() > MAX_CLAUSE:
                break
            if self._is_clause_end(cut):
                return cut.end()
        if len(self._text) > MAX_CLAUSE:
            return self._split_at_space()
        return len(self._text) if final else None

    def _is_clause_end(self, cut: re.Match[str]) -> bool:
        if cut.lastgroup == "line":
            return True
        before = self._text[: cut.end()]
        if _is_inside_markup(before):
            return False
        if cut.lastgroup == "pause":
            return len(before.strip()) >= (MIN_CLAUSE if self._has_emitted else MIN_FIRST_CLAUSE)
        return cut.lastgroup == "full" or not self._is_abbreviated(before)

    def _is_abbreviated(self, before: str) -> bool:
        if not before.endswith("."):
            return False
        if self._begins_line and _NUMBERED.fullmatch(before):
            return True
        word = _WORD.search(before)
        return bool(_INITIAL.search(before)) or (word is not None and word[1].lower() in _ABBREVIATIONS)

    def _split_at_space(self) -> int:
        position = max(self._text.rfind(" ", 1, MAX_CLAUSE), self._text.rfind("\t", 1, MAX_CLAUSE))
        return position + 1 if position > 0 else MAX_CLAUSE


def _closes_fence(line: str, mark: str) -> bool:
    """A fence is closed by a line of at least as many of its marks and nothing else."""
    return len(line) >= len(mark) and set(line) == {mark[0]}


def _is_inside_markup(text: str) -> bool:
    """Whether a link or inline code is open at the end of the text."""
    if text.count("`") % 2:
        return True
    link = text.rfind("](")
    if link >= 0 and ")" not in text[link:]:
        return True
    return text.rfind("[") > text.rfind("]")


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
        words = "" if piece.is_code else normalize_text(piece.text, language, piece.begins_line)
        return SpokenClause(piece.text, words, language)


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


def not_spoken(error: Exception) -> str:
    """The notice of a reply whose voice is missing or failed."""
    return f"The reply is not spoken: {error}"


def choose_voice(speaker: Speaker, language: str = "", reference: bytes = b"") -> tuple[VoiceSettings, tuple[str, ...]]:
    """The speaker's voice for a language and a recording to clone, and notices of what it can't do."""
    notices = []
    if reference and not speaker.can_clone:
        notices.append(f"The voice {speaker.name!r} can't imitate a recording: it speaks as usual.")
        reference = b""
    voice = VoiceSettings(language if language.lower() in speaker.voices else "", reference=reference)
    spoken = speaker.language(voice)
    if language and spoken.partition("-")[0].lower() != language.partition("-")[0].lower():
        notices.append(f"The voice {speaker.name!r} does not speak {language!r}: it speaks {spoken!r}.")
    return voice, tuple(notices)


DEFAULT_SPEAKER = "espeak"


def load_speaker(name: str = DEFAULT_SPEAKER) -> Speaker:
    """`espeak`, or the folder or hub id of a text-to-speech model. May take a while."""
    return Espeak() if name == DEFAULT_SPEAKER else ModelSpeaker(name)


class SpeakerCache:
    """The speaker in use, loaded on first use."""

    def __init__(self, name: str = DEFAULT_SPEAKER) -> None:
        self.name = name
        self._speaker: Speaker | None = None
        self._lock = asyncio.Lock()

    async def current(self) -> Speaker:
        """Raises VoiceMissing or another ModelError if the speaker cannot be loaded."""
        async with self._lock:
            if self._speaker is None:
                self._speaker = await asyncio.to_thread(load_speaker, self.name)
            return self._speaker

    async def close(self) -> None:
        """May be called twice. `current` loads the speaker again."""
        async with self._lock:
            if self._speaker is not None:
                await asyncio.to_thread(self._speaker.close)
                self._speaker = None
