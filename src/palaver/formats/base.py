"""The interface of a format: `render` makes a prompt of messages, `reader` makes events of reply tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from palaver.formats.facts import Switch
from palaver.formats.media import ExpandMedia, Placeholder
from palaver.formats.reader import ReplyReader
from palaver.formats.tokenizer import Tokenizer
from palaver.generation import Prompt
from palaver.messages import Message, Tool


@dataclass(frozen=True, slots=True)
class RenderOptions:
    thinking: bool | None = None
    """None leaves it to the template's default."""
    effort: str | None = None
    """The reasoning effort, as a word that the template knows. "none" and its synonyms switch thinking off."""
    budget: int | None = None
    """The thinking budget in tokens, for templates that tell it to the model. 0 switches thinking off."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Template variables by name (`chat_template_kwargs`). A name that the template never reads is refused."""
    now: datetime | None = None
    """The time for templates that ask for it. It is fixed for a conversation, so that prefixes stay cacheable."""
    calls: bool = True
    """Whether tools may be called. If not, the markup of calls is text."""
    must_call: Collection[str] = ()
    """Names of tools; one of them must be called before any answer (`tool_choice`)."""
    one_call: bool = False
    """Whether the reply ends before a second call (`parallel_tool_calls=False`)."""
    response_prefix: str = ""
    """The first text of the reply. Markers in it count as markers."""
    unsplit: bool = False
    """Thinking and its markers stay in the answer, as the model wrote them."""
    healing: bool = False
    """Token healing: a partial reply is cut back to a token boundary. For engines that support `Prompt.healing`."""
    json_answer: bool = False
    """The answer is JSON. A code fence around it is removed."""
    max_prompt_tokens: int | None = None
    """A longer prompt is refused, even if the context would hold it."""
    media: Mapping[str, int] = field(default_factory=dict)
    """How media are processed: `max_slice_nums` and `use_image_id` for processors that know them; `stack_frames`: the
    frames of each second of a video, of which all but the first are joined in one picture; `frames_per_second` and
    `max_frames` of a video."""


class Format(Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings that the template itself declares."""
        ...

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The template variables that a request can set."""
        ...

    @property
    def thinking_switch(self) -> Switch | None:
        """The switch that turns thinking on and off, if any."""
        ...

    @property
    def thinks(self) -> bool:
        """Whether the format has thinking."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether the format has tool calls."""
        ...

    @property
    def call_marker(self) -> int | str | None:
        """The marker that opens a tool call, as a token id or as text. None if an answer could contain it."""
        ...

    @property
    def placeholders(self) -> Mapping[str, Placeholder]:
        """What the format writes for media, by kind; empty if it knows none."""
        ...

    @property
    def result_media(self) -> frozenset[str]:
        """The kinds of media for which the format writes its placeholders in tool results, too."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: RenderOptions = ...,
        reply_so_far: Sequence[int] = (),
        partial_reply: Message | None = None,
        past_replies: Sequence[Sequence[int] | None] = (),
        expand: ExpandMedia | None = None,
    ) -> Prompt:
        """The prompt for the assistant's next turn, or for the rest of a partial reply.

        A partial reply is given by its token ids (`reply_so_far`), or as a message if only its text is known.
        `past_replies` are the token ids of the assistant messages, in order; None for those that are not known.
        `expand` expands media for the model; without it, media are refused.
        """
        ...

    def reader(
        self, prompt: Prompt, stops: Sequence[str] = (), tools: Sequence[Tool] = (), options: RenderOptions = ...
    ) -> ReplyReader: ...
