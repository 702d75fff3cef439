"""What may be chosen about the rendering and reading of one turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    thinking: bool | None = None
    """None leaves it to the template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None
    """The time a template that asks for it is told; fixed for a conversation, so that caches hit."""
    calls: bool = True
    """Whether tools may be called; without, markup of calls is text."""
    response_prefix: str = ""
    """The reply's own first words, markers and all."""
    unsplit: bool = False
    """Thinking stays in the answer, as the model wrote it."""
    healing: bool = False
    """Whether a begun reply may be cut back to where a token begins; for engines that take `Prompt.healing`."""
    json_answer: bool = False
    """The answer is to be JSON: a code fence around it is no part of it."""
