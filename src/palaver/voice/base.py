"""The interface of speakers (text in, audio samples out), their settings, errors and values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaver.errors import EngineError, ModelError

Samples: TypeAlias = NDArray[np.float32]
"""Audio: mono, from -1 to 1, `SAMPLE_RATE` samples per second."""

SAMPLE_RATE = 24_000
OPENAI_VOICES = tuple("alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split())
"""OpenAI's voice names: every speaker maps them to its own voices."""
SPEEDS = (0.25, 4.0)
"""The range of speeds, relative to the voice's own."""

IsStopped: TypeAlias = Callable[[], bool]
"""Returns whether synthesis was cancelled; called repeatedly while a clause is synthesized."""


@dataclass(frozen=True, slots=True)
class VoiceSettings:
    """The voice, its speed, and a recording to clone."""

    name: str = ""
    """One of the speaker's voices; empty for its default."""
    speed: float = 1.0
    reference: bytes = b""
    """A recording (float32 samples at `SAMPLE_RATE`) of a voice to clone, for speakers that can."""


class Speaker(Protocol):
    """Synthesizes speech; blocks while it works. `speech.Speech` calls it in its executor."""

    @property
    def name(self) -> str: ...

    @property
    def voices(self) -> tuple[str, ...]:
        """The names that `VoiceSettings.name` may have."""
        ...

    @property
    def can_clone(self) -> bool:
        """Whether it can clone the voice of a recording."""
        ...

    @property
    def executor(self) -> Executor:
        """The thread to call it in: its own, so that other work does not wait for it."""
        ...

    def language(self, voice: VoiceSettings) -> str:
        """The voice's language, such as `en` or `pt-br`. Raises BadParameter if there is no such voice."""
        ...

    def synthesize(self, words: str, language: str, voice: VoiceSettings, is_stopped: IsStopped) -> Samples:
        """The audio of one clause: deterministic, independent of earlier clauses. Ends early when `is_stopped`."""
        ...

    def close(self) -> None:
        """Frees its resources. May be called twice."""
        ...


def silence() -> Samples:
    return np.zeros(0, dtype=np.float32)


class VoiceMissing(ModelError):
    """A package that a voice needs is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed: "
            "install it with `pip install 'palaver[voice]'`."
        )
        self.package = package


class VoiceFailed(EngineError):
    """A speaker failed to synthesize a clause, or a transcriber to transcribe."""


@dataclass(frozen=True, slots=True)
class SpeechModelInfo:
    voices: tuple[str, ...] = ()
    language: str = "en"
    can_clone: bool = False
    """Whether it can clone the voice of a recording."""
    variable_speed: bool = False
    """Whether its speed can be changed."""


@dataclass(frozen=True, slots=True)
class SpeechRequestFrame:
    words: str
    voice: str = ""
    speed: float = 1.0
    reference: Samples | None = None


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    samples: Samples
    rate: int


class SpeechModel(Protocol):
    @property
    def info(self) -> SpeechModelInfo: ...

    def synthesize(self, request: SpeechRequestFrame) -> SpeechChunk:
        """Deterministic, independent of earlier requests."""
        ...
