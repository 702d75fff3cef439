"""The two verbs of every format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from palaver.formats.options import Options
from palaver.formats.reader import Reader
from palaver.formats.switches import Switch
from palaver.formats.tokenizer import Tokenizer
from palaver.generation import Prompt
from palaver.messages import Message, Tool


class Format(Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer by the template's own word."""
        ...

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The variables by which the format can be told what to do."""
        ...

    @property
    def thinking_switch(self) -> Switch | None:
        """The one that turns thinking on and off, where there is one."""
        ...

    @property
    def thinks(self) -> bool:
        """Whether it knows thoughts."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether tools can be offered and calls be read."""
        ...

    @property
    def call_marker(self) -> int | str | None:
        """What a tool call opens with, as a token id or as text; None where that could be text of an answer."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Options = ...,
        reply_so_far: Sequence[int] = (),
        begun: Message | None = None,
        past: Sequence[Sequence[int] | None] = (),
    ) -> Prompt:
        """The prompt for the assistant's next turn, or for the rest of a reply that has been begun.

        `past`: the token ids of the replies among the messages, in their order, where they are known.
        """
        ...

    def reader(
        self, prompt: Prompt, stops: Sequence[str] = (), tools: Sequence[Tool] = (), options: Options = ...
    ) -> Reader: ...
