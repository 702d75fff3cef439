"""What every speaker is: words in, sound out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaver.errors import EngineError, ModelError

Samples: TypeAlias = NDArray[np.float32]
"""Sound: one channel, from -1 to 1, `RATE` samples a second."""

RATE = 24_000
OPENAI_VOICES = tuple("alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split())
"""The names that OpenAI's clients know: every speaker takes them for one of its own."""
SPEEDS = (0.25, 4.0)
"""How slow and how fast speech may be, where 1 is the voice's own pace."""

Stopped: TypeAlias = Callable[[], bool]
"""Whether nobody listens any more; asked again and again while a clause is said."""


@dataclass(frozen=True, slots=True)
class VoiceSettings:
    """How something is said."""

    name: str = ""
    """One of the speaker's voices; none is its own choice."""
    speed: float = 1.0
    reference: bytes = b""
    """A recording (float32 samples at `RATE`) of the voice to speak with, where the speaker follows one."""


class Speaker(Protocol):
    """Blocks while it works: see `speech.Speech` for how it is asked."""

    @property
    def name(self) -> str: ...

    @property
    def voices(self) -> tuple[str, ...]:
        """The names a `Voice` may have."""
        ...

    @property
    def follows(self) -> bool:
        """Whether it can speak with the voice of a recording."""
        ...

    @property
    def thread(self) -> Executor:
        """Where it is asked: a thread of its own, so that nobody else waits for it."""
        ...

    def language(self, voice: VoiceSettings) -> str:
        """The language the voice speaks, as in `en` or `pt-br`. BadParameter where there is no such voice."""
        ...

    def say(self, words: str, language: str, voice: VoiceSettings, stopped: Stopped) -> Samples:
        """The sound of one clause: the same for the same words, whatever was said before. Ends early when `stopped`."""
        ...

    def close(self) -> None:
        """Lets go of what it holds. May be called twice."""
        ...


def silence() -> Samples:
    return np.zeros(0, dtype=np.float32)


class VoiceMissing(ModelError):
    """What a voice needs is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed: "
            "install it with `pip install 'palaver[voice]'`."
        )
        self.package = package


class VoiceFailed(EngineError):
    """A voice that did not say what it should have said."""


@dataclass(frozen=True, slots=True)
class SpeechModelInfo:
    voices: tuple[str, ...] = ()
    language: str = "en"
    follows: bool = False
    """Whether it takes a recording to speak like."""
    speeds: bool = False
    """Whether it can speak faster or slower."""


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
    def about(self) -> SpeechModelInfo: ...

    def say(self, asked: SpeechRequestFrame) -> SpeechChunk:
        """The same for the same words, whatever was said before."""
        ...
