"""The input and the outputs of an engine: a prompt of token ids in, tokens and status out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from palaver.phases import PLAIN, Phases


@dataclass(frozen=True, slots=True)
class Prompt:
    """`context_ids` are the rendered messages, `reply_ids` the tokens of the reply so far.

    The prefix cache is never shared between different `owner`s or `adapter`s.
    """

    context_ids: tuple[int, ...]
    reply_ids: tuple[int, ...] = ()
    phases: Phases = field(default=PLAIN)
    owner: str = ""
    adapter: str = ""
    conversation: str = ""
    """The id of its conversation, whose cache `Engine.forget` frees."""
    healing: bytes = b""
    """Token healing: the bytes that the next tokens must start with, the end of a partial reply cut inside a token."""

    answer_at: int | None = None
    """The number of reply tokens at which the answer was requested: from there on open thinking is closed."""

    def __len__(self) -> int:
        return len(self.context_ids) + len(self.reply_ids)


class Finish(StrEnum):
    END = "end"
    """The model ended its turn."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    STOPPED = "stopped"
    """The user stopped it."""


@dataclass(frozen=True, slots=True)
class Queued:
    type: Literal["queued"] = field(default="queued", kw_only=True, repr=False)
    position: int
    """1 is the next to be admitted."""
    seconds: float | None = None
    """The estimated wait; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed; `cached_tokens` of it were in the cache already."""

    type: Literal["prefilled"] = field(default="prefilled", kw_only=True, repr=False)
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Alternative:
    token_id: int
    logprob: float


NO_LOGPROB = float("nan")
"""The log-probability of a token that was not sampled, such as the prefix of an edited reply."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of the reply. `logprob` is of the raw logits, before any sampling parameter."""

    type: Literal["step"] = field(default="step", kw_only=True, repr=False)
    token_id: int
    logprob: float
    alternatives: tuple[Alternative, ...] = ()
    """The most likely tokens by the raw log-probabilities."""
    drawn_logprob: float | None = None
    """Its log-probability after all sampling parameters. Set, like `drawn_from`, if alternatives are requested."""
    drawn_from: tuple[Alternative, ...] = ()
    """The most likely tokens after all sampling parameters."""


def prefill_steps(ids: Iterable[int]) -> tuple[Step, ...]:
    """Steps for prefilled tokens, which were not sampled."""
    return tuple(Step(id, NO_LOGPROB) for id in ids)


@dataclass(frozen=True, slots=True)
class AnswerRequested:
    """Open thinking is closed from the reply's token at `position` on. Comes before that token."""

    type: Literal["answer_requested"] = field(default="answer_requested", kw_only=True, repr=False)
    position: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last output of a generation that did not fail."""

    type: Literal["ended"] = field(default="ended", kw_only=True, repr=False)
    finish: Finish
    stop: str | None = None
    """The stop string that ended it."""


Output = Queued | Prefilled | Step | AnswerRequested | Ended
