"""An engine's input and output: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from palaver.phases import PLAIN, Phases


@dataclass(frozen=True, slots=True)
class Prompt:
    """`context_ids` is what the model reads, `reply_ids` what it has already said in this turn.

    `owner` and `adapter` keep apart what may not be shared between users or between adapted weights.
    """

    context_ids: tuple[int, ...]
    reply_ids: tuple[int, ...] = ()
    phases: Phases = field(default=PLAIN)
    owner: str = ""
    adapter: str = ""
    conversation: str = ""
    """What it is part of: an engine may be told to forget all that it keeps of it."""
    healing: bytes = b""
    """The bytes that the next tokens must write first: the end of a begun reply, cut off inside of a token."""

    answer_at: int | None = None
    """How many tokens the reply has where somebody asked for the answer: from there on an open thought is closed."""

    def __len__(self) -> int:
        return len(self.context_ids) + len(self.reply_ids)


class Finish(StrEnum):
    END = "end"
    """The model ended its turn."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    STOPPED = "stopped"
    """Somebody stopped it."""


@dataclass(frozen=True, slots=True)
class Queued:
    position: int
    """1 is the next to be let in."""
    seconds: float | None = None
    """About how long it will take, where that is known."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is in the cache; `cached_tokens` of it were there already."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Alternative:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Step:
    """One token of the reply. `logprob` is the model's own, before any sampling option."""

    token_id: int
    logprob: float
    alternatives: tuple[Alternative, ...] = ()
    """The likeliest tokens by the model's own log-probabilities."""
    drawn_logprob: float | None = None
    """After all sampling options: what it was drawn with. Given, like the next, where alternatives are asked for."""
    drawn_from: tuple[Alternative, ...] = ()
    """The likeliest tokens after all sampling options."""


@dataclass(frozen=True, slots=True)
class AnswerAsked:
    """From the reply's token at `position` on an open thought is closed; comes before that token."""

    position: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last output of every generation that didn't fail."""

    finish: Finish
    stop: str | None = None
    """The stop string that was met."""


Output = Queued | Prefilled | Step | AnswerAsked | Ended
