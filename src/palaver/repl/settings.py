"""Settings of a session, from the command line; presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from palaver.chat.interface import Chat
from palaver.errors import RequestError
from palaver.repl import strings
from palaver.store import Preset


class ThinkingDisplay(StrEnum):
    """How thinking is shown."""

    COLLAPSED = "collapsed"
    """The last lines while the model thinks, then one summary line."""
    EXPANDED = "expanded"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    folder: Path
    """The folder of the input history."""
    conversation: str | None = None
    """The id of the conversation to open, or a prefix of it."""
    resume: bool = False
    """Opens the newest conversation."""
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    """Raw text, nothing redrawn. Implied if the output is not a terminal."""
    thinking_display: ThinkingDisplay = ThinkingDisplay.COLLAPSED
    client: str = "terminal"
    """The client name under which the position in each conversation is stored."""
    is_attached: bool = False
    """Whether the model runs in a server, which decides what can be loaded."""


_ON_WORDS = ("on", "true", "yes", "1")
_OFF_WORDS = ("off", "false", "no", "0")


def parse_switch(word: str) -> bool | None:
    """On or off, by any usual word for it; None for other words."""
    return True if word.lower() in _ON_WORDS else False if word.lower() in _OFF_WORDS else None


class NoPreset(RequestError):
    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        others = strings.PRESET_OTHERS.format(names=", ".join(names)) if names else strings.NO_PRESETS
        super().__init__(strings.PRESET_UNKNOWN.format(name=name, others=others))


async def find_preset(chat: Chat, name: str) -> Preset:
    """The preset of that name. The error for an unknown name lists the presets."""
    presets = {one.name: one for one in await chat.presets()}
    if name not in presets:
        raise NoPreset(name, tuple(presets))
    return presets[name]
