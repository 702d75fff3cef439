"""What a text-to-speech model is asked, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from palaver.voice.base import Samples


@dataclass(frozen=True, slots=True)
class About:
    voices: tuple[str, ...] = ()
    language: str = "en"
    follows: bool = False
    """Whether it takes a recording to speak like."""
    speeds: bool = False
    """Whether it can speak faster or slower."""


@dataclass(frozen=True, slots=True)
class Asked:
    words: str
    voice: str = ""
    speed: float = 1.0
    reference: Samples | None = None


@dataclass(frozen=True, slots=True)
class Sound:
    samples: Samples
    rate: int


class SpeechModel(Protocol):
    @property
    def about(self) -> About: ...

    def say(self, asked: Asked) -> Sound:
        """The same for the same words, whatever was said before."""
        ...
