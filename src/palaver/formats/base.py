"""The two verbs of every format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from palaver.formats.options import Options
from palaver.formats.reader import Reader
from palaver.generation import Prompt
from palaver.messages import Message, Tool


class Format(Protocol):
    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer by the template's own word."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options = ...,
        reply_so_far: Sequence[int] = (),
        begun: Message | None = None,
    ) -> Prompt:
        """The prompt for the assistant's next turn, or for the rest of a reply that has been begun."""
        ...

    def reader(
        self, prompt: Prompt, stops: Sequence[str] = (), tools: Sequence[Tool] = (), options: Options = ...
    ) -> Reader: ...
