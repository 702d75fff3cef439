"""A model that can be talked to: its engine and its format, under one name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from palaver.chat.reply_stream import Keep, ReplyRecord, ReplyRequest, ReplyStream
from palaver.engines.base import Engine
from palaver.errors import ContextOverflow, NothingToContinue
from palaver.formats.base import Format
from palaver.formats.reader import ReplyReader
from palaver.generation import Finish, Prompt
from palaver.messages import Message, Text, Tool, ToolResult
from palaver.phases import Vocabulary
from palaver.sampling import MAX_SEED, MAX_TOKENS, Sampling, checked


def draw_seed() -> int:
    """A seed small enough to be read aloud and typed again."""
    return secrets.randbelow(min(2**32, MAX_SEED))


def extend_limit(sampling: Sampling, said: int) -> Sampling:
    """The sampling of a reply that was cut for its length and goes on: as much again."""
    return sampling if sampling.max_tokens is None else replace(sampling, max_tokens=said + sampling.max_tokens)


def offset_limits(sampling: Sampling, tokens: int) -> Sampling:
    """The same limits for what comes after the reply's first `tokens` tokens."""
    if not tokens:
        return sampling
    least = min(tokens + sampling.min_tokens, MAX_TOKENS) if sampling.min_tokens else 0
    most = None if sampling.max_tokens is None else min(tokens + sampling.max_tokens, MAX_TOKENS)
    return replace(sampling, min_tokens=least, max_tokens=most)


@dataclass(frozen=True)
class Model:
    engine: Engine
    format: Format
    name: str = ""
    tokenizer: str = ""
    """The tokenizer's fingerprint: token ids of another one mean nothing here."""
    vocabulary: Vocabulary = ()
    notices: tuple[str, ...] = ()
    """What a person should know of how it was loaded."""

    def prompt(self, request: ReplyRequest, reply_so_far: Sequence[int] = (), begun: Message | None = None) -> Prompt:
        """What the model reads. ContextOverflow where that leaves no room for a reply."""
        self.check_size(text_size(request.messages, request.tools))
        rendered = self.format.render(
            request.messages, request.tools, request.options, reply_so_far, begun, request.past
        )
        limit = self.engine.info.context_length
        if len(rendered) >= limit:
            raise ContextOverflow(len(rendered), limit)
        phases = replace(rendered.phases, ends=rendered.phases.ends | self.engine.info.end_ids)
        return replace(
            rendered,
            phases=phases,
            owner=request.owner,
            conversation=request.conversation,
            answer_at=request.answer_at,
        )

    def check_size(self, characters: int) -> None:
        """ContextOverflow, before anything is tokenized, where a text is far too long for the context.

        Four times what the longest tokens could hold passes: a tokenizer or a template may leave something out.
        """
        limit = self.engine.info.context_length
        if self._longest_token and characters > 4 * limit * self._longest_token:
            raise ContextOverflow(characters // self._longest_token, limit)

    @cached_property
    def _longest_token(self) -> int:
        """In bytes; 0 where the tokens are not known."""
        return max(map(len, self.vocabulary), default=0)

    def utterance(
        self,
        request: ReplyRequest,
        reply_so_far: Sequence[int] = (),
        begun: Message | None = None,
        keep: Keep | None = None,
        limit_added: bool = False,
        prompt: Prompt | None = None,
    ) -> ReplyStream:
        """A reply to enter; with `reply_so_far`, the token ids of one that goes on; with `begun`, its text alone.

        `prompt` is all of it, rendered before. `limit_added`: `min_tokens` and `max_tokens` count what is
        added to that, not the whole reply.
        """
        request = self._stopping(request)
        if prompt is None:
            prompt = self.prompt(request, reply_so_far, begun)
        prompt = replace(prompt, conversation=request.conversation)
        if limit_added:
            request = replace(request, sampling=offset_limits(request.sampling, len(prompt.reply_ids)))
        return ReplyStream(request, prompt, self._reader(request, prompt), self.engine, keep)

    def reader(self, request: ReplyRequest, reply_so_far: Sequence[int]) -> ReplyReader:
        """Reads a reply that somebody else generates, or that is over."""
        request = self._stopping(request)
        return self._reader(request, self.prompt(request, reply_so_far))

    def _reader(self, request: ReplyRequest, prompt: Prompt) -> ReplyReader:
        return self.format.reader(prompt, request.sampling.stop, request.tools, request.options)

    def _stopping(self, request: ReplyRequest) -> ReplyRequest:
        """With the stop strings that the template itself declares."""
        stops = tuple(dict.fromkeys((*request.sampling.stop, *self.format.stop_strings)))
        return replace(request, sampling=checked(replace(request.sampling, stop=stops)))

    def continued(self, reply: ReplyRecord) -> ReplyStream:
        """Goes on with a stopped reply, token for token as if it had not been stopped.

        One that was cut for its length gets the same length again.
        """
        if reply.finish in (Finish.END, Finish.STOP_STRING):
            raise NothingToContinue("The reply is whole: there is nothing to continue.")
        request = reply.request
        if reply.finish is Finish.LENGTH:
            request = replace(request, sampling=extend_limit(request.sampling, len(reply.token_ids)))
        return self.utterance(request, reply.token_ids)

    async def reply(self, request: ReplyRequest, reply_so_far: Sequence[int] = ()) -> ReplyRecord:
        """The whole reply at once: the same stream, folded."""
        async with self.utterance(request, reply_so_far) as utterance:
            async for _ in utterance:
                pass
            return utterance.reply()


def text_size(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Characters that every template shows; thoughts of the past are often left out."""
    parts = [part for message in messages for part in message.parts]
    said = sum(len(part.text) for part in parts if isinstance(part, Text))
    results = sum(len(part.content) for part in parts if isinstance(part, ToolResult))
    return said + results + sum(len(tool.description) + _size(tool.parameters) for tool in tools)


def _size(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(len(name) + _size(one) for name, one in value.items())
        case list() | tuple():
            return sum(map(_size, value))
        case _:
            return 0
