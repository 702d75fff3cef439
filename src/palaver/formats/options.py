"""What may be chosen about the rendering and reading of one turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    thinking: bool | None = None
    """None leaves it to the template."""
    effort: str | None = None
    """How hard to think, in a word that the template knows; one such as "none" switches thinking off."""
    budget: int | None = None
    """For how many tokens to think, where the template tells the model; 0 switches thinking off."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template by their own names. One that it never asks for is refused."""
    now: datetime | None = None
    """The time a template that asks for it is told; fixed for a conversation, so that caches hit."""
    calls: bool = True
    """Whether tools may be called; without, markup of calls is text."""
    must_call: Collection[str] = ()
    """The tools of which one must be called before anything is answered."""
    one_call: bool = False
    """Whether the reply ends where it would begin a second call."""
    response_prefix: str = ""
    """The reply's own first words, markers and all."""
    unsplit: bool = False
    """Thinking stays in the answer, as the model wrote it."""
    healing: bool = False
    """Whether a begun reply may be cut back to where a token begins; for engines that take `Prompt.healing`."""
    json_answer: bool = False
    """The answer is to be JSON: a code fence around it is no part of it."""
