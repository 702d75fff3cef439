"""What a session is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Thoughts(StrEnum):
    """How much is shown of what the model thinks."""

    COLLAPSED = "collapsed"
    """The last lines while it thinks, then one line."""
    EXPANDED = "expanded"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class Settings:
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
    thoughts: Thoughts = Thoughts.COLLAPSED
    client: str = "terminal"
    """Under which name the place in each conversation is remembered."""
