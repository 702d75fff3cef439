"""The two verbs of every format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from palaver.formats.reader import ReplyReader
from palaver.formats.switches import Switch
from palaver.formats.tokenizer import Tokenizer
from palaver.generation import Prompt
from palaver.messages import Message, Tool


@dataclass(frozen=True, slots=True)
class RenderOptions:
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
        options: RenderOptions = ...,
        reply_so_far: Sequence[int] = (),
        begun: Message | None = None,
        past: Sequence[Sequence[int] | None] = (),
    ) -> Prompt:
        """The prompt for the assistant's next turn, or for the rest of a reply that has been begun.

        `past`: the token ids of the replies among the messages, in their order, where they are known.
        """
        ...

    def reader(
        self, prompt: Prompt, stops: Sequence[str] = (), tools: Sequence[Tool] = (), options: RenderOptions = ...
    ) -> ReplyReader: ...
