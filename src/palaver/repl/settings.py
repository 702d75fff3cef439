"""What a session is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from palaver.chat.interface import Chat
from palaver.errors import RequestError
from palaver.store import Preset


class ThinkingDisplay(StrEnum):
    """How much is shown of what the model thinks."""

    COLLAPSED = "collapsed"
    """The last lines while it thinks, then one line."""
    EXPANDED = "expanded"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    folder: Path
    """Where the history of what was typed is kept."""
    conversation: str | None = None
    """The id of the conversation to open, or its beginning."""
    resume: bool = False
    """Opens the conversation that was talked in last."""
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    """Raw text, nothing redrawn; always so where the output is no terminal."""
    thoughts: ThinkingDisplay = ThinkingDisplay.COLLAPSED
    client: str = "terminal"
    """Under which name the place in each conversation is remembered."""


class NoPreset(RequestError):
    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        known = f"there are {', '.join(names)}" if names else "there are none yet: /preset save NAME makes one"
        super().__init__(f"There is no preset {name!r}; {known}.")


async def find_preset(chat: Chat, name: str) -> Preset:
    """The one of that name; where there is none, those that there are are told."""
    known = {one.name: one for one in await chat.presets()}
    if name not in known:
        raise NoPreset(name, tuple(known))
    return known[name]
