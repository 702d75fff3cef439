"""Transcription: sound in, text out, by a speech recognition model in a child process (`transcription_child`).

Long sound is divided at quiet places into windows that the model takes at once. A transcript comes window by window,
and the windows of several requests take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TypeVar, TypeVarTuple, Unpack

import numpy as np

from palaver.errors import BadParameter, ModelError
from palaver.voice.base import IsStopped, Samples
from palaver.voice.model_process import ModelProcess

_QUIET_SHARE = 0.2
"""The last part of a window, in which the quietest place is searched."""
_QUIET_SECONDS = 0.1
MAX_SOUNDS = 4
"""Sounds that are transcribed, and held in memory, at the same time. Others wait."""
T = TypeVar("T")
A = TypeVarTuple("A")


@dataclass(frozen=True, slots=True)
class TranscriberInfo:
    sample_rate: int = 16_000
    window_seconds: float = 30.0
    """The longest sound that the model takes at once."""
    languages: tuple[str, ...] = ()
    """The languages that can be asked for, such as `en`; empty if the model can't be told the language."""
    can_translate: bool = False
    """Whether it can translate into English."""
    takes_prompt: bool = False
    samples: bool = False
    """Whether a temperature above 0 has an effect."""
    times_words: bool = False


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    language: str = ""
    """The language that is spoken; empty to detect it."""
    prompt: str = ""
    """Text whose style and spelling the transcript follows."""
    temperature: float = 0.0
    translate: bool = False
    timestamps: bool = False
    """Whether the model marks the times of segments; otherwise a segment is a window."""
    words: bool = False
    """Whether segments have their words with times. Needs `timestamps`."""


@dataclass(frozen=True, slots=True)
class Word:
    start: float
    """In seconds."""
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    start: float
    """In seconds."""
    end: float
    text: str
    """Verbatim: the texts of all segments joined are the transcript."""
    token_ids: tuple[int, ...] = ()
    words: tuple[Word, ...] = ()

    def shifted(self, seconds: float) -> Segment:
        """The segment with later times."""
        words = (replace(word, start=word.start + seconds, end=word.end + seconds) for word in self.words)
        return replace(self, start=self.start + seconds, end=self.end + seconds, words=tuple(words))

    def limited(self, seconds: float) -> Segment:
        """The segment with no time after this one."""
        words = (replace(word, start=min(word.start, seconds), end=min(word.end, seconds)) for word in self.words)
        return replace(self, start=min(self.start, seconds), end=min(self.end, seconds), words=tuple(words))


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the sound, its segments and its language, which is empty if the model does not say it."""

    segments: tuple[Segment, ...]
    language: str = ""


@dataclass(frozen=True, slots=True)
class TranscribedSound:
    segments: tuple[Segment, ...]
    language: str
    seconds: float

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


class NoTranscriber(ModelError):
    def __init__(self) -> None:
        super().__init__(
            "No transcriber is set up here: start Palaver with `--transcriber MODEL`, such as openai/whisper-small."
        )


class Transcriber:
    """A speech recognition model, by its folder or hub id. It is loaded on first use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model: ModelProcess | None = None
        self._executor = ThreadPoolExecutor(1, "transcriber")
        self.places = asyncio.Semaphore(MAX_SOUNDS)
        """Taken by a request before it decodes its sound: an hour of it takes 230 MB."""

    async def info(self) -> TranscriberInfo:
        """Raises BrokenModel if the model can't be loaded."""
        return await self._run(self._info)

    async def check(self, options: TranscriptionOptions) -> TranscriberInfo:
        """Raises BadParameter for what the model can't do."""
        info = await self.info()
        if options.language and options.language not in info.languages:
            known = f"must be one of {', '.join(info.languages)}" if info.languages else "can't be set for this model"
            raise BadParameter("language", options.language[:80], known)
        if options.prompt and not info.takes_prompt:
            raise BadParameter("prompt", options.prompt[:80], f"{self.name} takes no prompt")
        if options.temperature and not info.samples:
            raise BadParameter("temperature", options.temperature, f"{self.name} has no temperature")
        if options.translate and not info.can_translate:
            raise BadParameter("model", self.name, "can't translate; a Whisper model of several languages can")
        if options.words and not info.times_words:
            raise BadParameter("timestamp_granularities", "word", f"{self.name} has no times of words: use segment")
        return info

    async def windows(self, samples: Samples, options: TranscriptionOptions) -> AsyncGenerator[Window]:
        """Transcribes sound at the model's rate, window by window. Closing the stream stops it."""
        info = await self.check(options)
        stopped = False
        try:
            for start, end in split_sound(samples, info.sample_rate, info.window_seconds):
                arguments = (samples[start:end], options, lambda: stopped)
                window = await self._run(self._transcribe, *arguments)
                yield _shift(window, start / info.sample_rate)
                options = replace(options, language=options.language or window.language)
        finally:
            stopped = True

    async def transcribe(self, samples: Samples, options: TranscriptionOptions) -> TranscribedSound:
        info = await self.check(options)
        windows = [window async for window in self.windows(samples, options)]
        return join_windows(windows, options, len(samples) / info.sample_rate)

    async def close(self) -> None:
        """Ends running requests, which fail. May be called twice."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._model is not None:
            await asyncio.to_thread(self._model.close)

    async def _run(self, function: Callable[[Unpack[A]], T], *arguments: *A) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _loaded(self) -> ModelProcess:
        if self._model is None:
            self._model = ModelProcess("palaver.voice.transcription_child", self.name, "transcriber")
        return self._model

    def _info(self) -> TranscriberInfo:
        info = self._loaded().info
        return TranscriberInfo(**{**info, "languages": tuple(info["languages"])})

    def _transcribe(self, samples: Samples, options: TranscriptionOptions, is_stopped: IsStopped) -> Window:
        response = self._loaded().request(asdict(options), samples.tobytes(), is_stopped)
        if response is None:
            return Window(())
        value = response[0]
        segments = (
            Segment(
                one["start"],
                one["end"],
                one["text"],
                tuple(one["token_ids"]),
                tuple(Word(**word) for word in one["words"]),
            )
            for one in value["segments"]
        )
        return Window(tuple(segments), value["language"])


def _shift(window: Window, seconds: float) -> Window:
    """The window with times from the beginning of the sound."""
    return replace(window, segments=tuple(one.shifted(seconds) for one in window.segments))


def join_windows(windows: Sequence[Window], options: TranscriptionOptions, seconds: float) -> TranscribedSound:
    """A segment never ends after the sound: models count in whole windows."""
    segments = (one.limited(seconds) for window in windows for one in window.segments)
    language = options.language or next((window.language for window in windows), "")
    return TranscribedSound(tuple(segments), language, seconds)


def split_sound(samples: Samples, rate: int, max_seconds: float) -> Iterator[tuple[int, int]]:
    """The windows of the sound, as pairs of start and end. Each but the last ends at the quietest place of its last
    fifth, so that words stay whole."""
    longest, quiet = int(max_seconds * rate), max(1, int(_QUIET_SECONDS * rate))
    start = 0
    while len(samples) - start > longest:
        end = start + longest
        searched = samples[end - max(quiet, int(longest * _QUIET_SHARE)) : end]
        pieces = searched[: len(searched) // quiet * quiet].reshape(-1, quiet)
        quietest = int(np.argmin((pieces * pieces).mean(axis=1)))
        cut = end - len(searched) + quietest * quiet + quiet // 2
        yield start, cut
        start = cut
    if start < len(samples):
        yield start, len(samples)


def format_srt(segments: Iterable[Segment]) -> str:
    """Subtitles in SubRip format."""
    blocks = (
        f"{number}\n{_timestamp(one.start, ',')} --> {_timestamp(one.end, ',')}\n{_subtitle(one.text)}\n"
        for number, one in enumerate(segments, 1)
    )
    return "\n".join(blocks)


def format_vtt(segments: Iterable[Segment]) -> str:
    """Subtitles in WebVTT format."""
    blocks = (
        f"{_timestamp(one.start, '.')} --> {_timestamp(one.end, '.')}\n{_subtitle(one.text)}\n" for one in segments
    )
    return "WEBVTT\n\n" + "\n".join(blocks)


def _subtitle(text: str) -> str:
    """One line without an arrow, which would be read as a time."""
    return " ".join(text.split()).replace("-->", "->")


def _timestamp(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
