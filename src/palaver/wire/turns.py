"""What is seen of a turn beside its events: tokens, the context's gauge, what changed."""

from __future__ import annotations

from palaver.chat import interface
from palaver.wire.base import Logprob, Told, logprob


class Alternative(Told):
    token_id: int
    text: str
    logprob: Logprob


class Token(Told):
    """One token of a reply as a person sees it. `logprob` is null for words that nobody drew."""

    token_id: int
    text: str
    logprob: Logprob | None
    alternatives: list[Alternative]

    @classmethod
    def of(cls, token: interface.ReplyToken) -> Token:
        return cls.model_validate(token)

    def value(self) -> interface.ReplyToken:
        others = (interface.TokenAlternative(one.token_id, one.text, logprob(one.logprob)) for one in self.alternatives)
        drawn = None if self.logprob is None else logprob(self.logprob)
        return interface.ReplyToken(self.token_id, self.text, drawn, tuple(others))


class Gauge(Told):
    """How full the context is: what the next turn's prompt would hold, and what the model can take."""

    used: int
    limit: int
    cached: int
    """Of the last turn's prompt, how much had been computed before."""

    @classmethod
    def of(cls, gauge: interface.ContextUsage) -> Gauge:
        return cls.model_validate(gauge)

    def value(self) -> interface.ContextUsage:
        return interface.ContextUsage(**dict(self))


class Change(Told):
    """Something happened in a conversation: whoever shows it may look again."""

    conversation_id: str
    what: str
    """created, changed, deleted, message, turn (begun or gone on), ended."""
    message_id: str | None

    @classmethod
    def of(cls, change: interface.ConversationChange) -> Change:
        return cls.model_validate(change)

    def value(self) -> interface.ConversationChange:
        return interface.ConversationChange(**dict(self))


class Raw(Told):
    """A reply as the model wrote it, markers and all."""

    text: str
