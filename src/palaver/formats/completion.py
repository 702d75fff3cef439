"""The format of a base model without a chat template: the message is the text that the model completes."""

from __future__ import annotations

from collections.abc import Sequence

from palaver.errors import BadParameter, EmptyMessage, NoMessages
from palaver.formats.base import RenderOptions
from palaver.formats.reader import ReaderOptions, ReplyReader
from palaver.formats.switches import Switch
from palaver.formats.tokenizer import Tokenizer
from palaver.generation import Prompt
from palaver.messages import Message, Role, Tool
from palaver.phases import Phase, Phases, State


class CompletionFormat:
    stop_strings: tuple[str, ...] = ()
    thinks = False
    takes_tools = False
    call_marker: int | str | None = None
    switches: tuple[Switch, ...] = ()
    thinking_switch: Switch | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
        reply_so_far: Sequence[int] = (),
        partial_reply: Message | None = None,
        past_replies: Sequence[Sequence[int] | None] = (),
    ) -> Prompt:
        thinking_options = (options.thinking, options.effort, options.budget)
        if any(option is not None for option in thinking_options) or options.variables or tools:
            raise BadParameter("raw", "on", "text is completed as it is: no thinking switch, no variables, no tools")
        if not messages:
            raise NoMessages
        if len(messages) > 1 or messages[0].role is not Role.USER:
            raise BadParameter("raw", "on", "text is completed as it is: no system prompt, no earlier turns")
        text = messages[0].text
        if not text:
            raise EmptyMessage
        ids = self.tokenizer.encode((*self.tokenizer.prefix, text))
        phases = Phases((State(Phase.ANSWER),), hidden=self.tokenizer.special_ids)
        reply = tuple(reply_so_far) or tuple(self.tokenizer.encode([partial_reply.text] if partial_reply else []))
        return Prompt(tuple(ids), reply, phases)

    def reader(
        self,
        prompt: Prompt,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
    ) -> ReplyReader:
        return ReplyReader(prompt, self.tokenizer.vocabulary, ReaderOptions(stops))
