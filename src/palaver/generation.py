"""The input and the outputs of an engine: a prompt of token ids in, tokens and status out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

from palaver.phases import PLAIN, Phases

MediaKind = Literal["image", "audio"]
"""What an encoder takes. A video reaches an engine as its frames and its sound."""


@dataclass(frozen=True, slots=True)
class MediaContent:
    """A decoded picture (height, width, 3; uint8) or sound (mono samples; float32)."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str
    rate: int = 0
    """Samples per second of sound."""


@dataclass(frozen=True)
class MediaItem:
    """A picture or a sound, by the hash of its content."""

    kind: MediaKind
    digest: str
    """The hash of the content."""
    placeholder: str
    """The text that the chat template writes for it, which the model's processor expands."""
    options: tuple[tuple[str, int], ...] = ()
    """Parameters of the model's processor, such as `max_slice_nums`."""
    load: Callable[[], MediaContent] | None = field(default=None, compare=False, repr=False)
    """Decodes the content. Blocks: call it in a thread. Not encoded: each process sets its own."""

    @cached_property
    def key(self) -> str:
        """Equal only for the same content, processed in the same way."""
        identity = repr((self.kind, self.digest, self.placeholder, self.options))
        return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class MediaExpansion:
    """The tokens that stand for an item in a prompt, as the model's processor writes them."""

    token_ids: tuple[int, ...]
    lead: int = 0
    tail: int = 0
    """How many of the first and of the last tokens are plain text, which may be tokenized differently in a prompt."""


@dataclass(frozen=True, slots=True)
class ExpandedMedia:
    item: MediaItem
    expansion: MediaExpansion

    @property
    def core(self) -> tuple[int, ...]:
        """The tokens without those of plain text at both ends."""
        ids = self.expansion.token_ids
        return ids[self.expansion.lead : len(ids) - self.expansion.tail]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The place of an item in a prompt: its tokens without those of plain text at both ends."""

    item: MediaItem
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


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
    """Token healing: the end of a partial reply that was cut inside a token. The tokens of the reply from `healing_at`
    on must write these bytes first."""
    healing_at: int = 0
    """The number of reply tokens before those bytes."""

    canvas: tuple[int | None, ...] = ()
    """Diffusion models: a text behind the context that is to be filled in. None is a token to write. The reply is the
    whole canvas, and ends with it."""

    answer_at: int | None = None
    """The number of reply tokens at which the answer was requested: from there on open thinking is closed."""
    media: tuple[MediaSpan, ...] = ()
    """The pictures and sounds among `context_ids`, in order."""
    turn: str = ""
    """The id of the reply, for logs and traces."""

    def without_content(self) -> Prompt:
        """The prompt without access to the content of its media, as it crosses to another process."""
        if not self.media:
            return self
        spans = (replace(span, item=replace(span.item, load=None)) for span in self.media)
        return replace(self, media=tuple(spans))

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
    """1 is the next to be admitted; 0 while the model is being loaded."""
    seconds: float | None = None
    """The estimated wait; None if it is not known."""
    loading: str = ""
    """The name of the model that is being loaded."""
    progress: float | None = None
    """How much of it is loaded, from 0 to 1; None if that is not known."""


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


@dataclass(frozen=True, slots=True)
class Draft:
    """The unfinished block of a reply that is written by denoising, after one step of it.

    The block starts `position` tokens into the reply. Its tokens come as `Step`s when all of them are there.
    """

    type: Literal["draft"] = field(default="draft", kw_only=True, repr=False)
    position: int
    token_ids: tuple[int | None, ...]
    """None: still masked."""
    confidence: tuple[float, ...]
    """The probability of the token that is there or would be, from 0 to 1."""


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


Output = Queued | Prefilled | Step | Draft | AnswerRequested | Ended
