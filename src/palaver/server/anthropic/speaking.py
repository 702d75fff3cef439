"""One reply as the events of its blocks, each thought signed with the tokens it was made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from palaver.generation import Finish
from palaver.server.anthropic.fields import MessagesRequest
from palaver.server.anthropic.signatures import sign
from palaver.server.anthropic.telling import PING, Blocks, Event, ending, message_end, message_start
from palaver.server.openai.answering import let_go
from palaver.server.openai.speaking import Choice, Told, Totals


class Spoken:
    """A reply without a conversation. Its owner reads `events` once and closes it."""

    def __init__(self, body: MessagesRequest, choice: Choice) -> None:
        self._body = body
        self._choice = choice
        self._signed = len(choice.utterance.prompt.reply_ids)
        """How many of the reply's tokens a signature told already, or were there before."""
        self._thought_at = (0, 0)
        """Where the last thought began: tokens of the reply, and those of them that were thought."""

    async def events(self, stream: AsyncGenerator[Told], first: asyncio.Future[Told]) -> AsyncGenerator[Event]:
        choice = self._choice
        blocks = Blocks(self._sign, choice.shown.thinking, self._opened)
        try:
            yield message_start(choice.model.name, self._begun_totals(), {})
            for event in blocks.open(choice.utterance.phase):
                yield event
            yield PING
            async with aclosing(_all(stream, first)) as tellings:
                async for told in tellings:
                    for event in blocks.take(told.events):
                        yield event
            for event in (*blocks.close(), *message_end(self._ending(blocks), choice.totals, blocks.notices)):
                yield event
        finally:
            await let_go(first, stream)

    def _begun_totals(self) -> Totals:
        """What is known at the beginning: the prompt, and once it is read what of it had been computed before."""
        totals = self._choice.totals
        return Totals(totals.prompt or len(self._choice.utterance.prompt), totals.cached)

    def _opened(self) -> None:
        utterance = self._choice.utterance
        self._thought_at = (utterance.said, utterance.usage.thinking_tokens)

    def _sign(self, thought: str) -> str:
        """A thought's tokens end where its last one was thought; the marker that closes it is one of them."""
        utterance = self._choice.utterance
        said, thinking = self._thought_at
        end = said + utterance.usage.thinking_tokens - thinking
        ids, self._signed = utterance.token_ids[self._signed : end], end
        return sign(self._choice.model.tokenizer, ids, thought, whole=not self._choice.shown.thinking)

    def _ending(self, blocks: Blocks) -> tuple[str, str | None]:
        choice, utterance = self._choice, self._choice.utterance
        limit = utterance.request.sampling.max_tokens
        finished = choice.finish
        full = finished is not None and finished.finish is Finish.LENGTH and (limit is None or utterance.said < limit)
        return ending(finished, blocks.calls, full, self._body.stop_sequences or ())


async def _all(stream: AsyncGenerator[Told], first: asyncio.Future[Told]) -> AsyncGenerator[Told]:
    """The stream with its first word, which was waited for already."""
    try:
        yield await first
    except StopAsyncIteration:
        return
    async for told in stream:
        yield told
