"""What a person may choose about the rendering of one turn."""

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
