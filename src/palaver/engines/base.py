"""The protocol of every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from palaver.generation import Output, Prompt
from palaver.sampling import Sampling

COMPILED = "compiled"
BY_TEXT = "depend on the text alone"
BY_CACHE = "depend on the text and on what was cached of it, not on other requests"
BY_COMPANY = "may depend on the requests that run beside it"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of the model it runs."""

    model: str
    context_length: int
    vocabulary_size: int
    end_ids: frozenset[int]
    """Token ids that end a turn, by the model's own configuration."""
    defaults: Sampling
    """The model's own sampling defaults."""
    device: str
    dtype: str
    reuse: str = "none"
    """What is reused of what was computed before: "to the token", "snapshots", or "none" and why."""
    steps: str = "the model's own code"
    """Whose code computes the next tokens: "the model's own code", "few operations", either with ", recorded", or
    COMPILED; and why no more."""
    exactness: str = BY_COMPANY
    """What the bits of a reply do, as a probe found when the model was loaded: BY_TEXT, BY_CACHE or BY_COMPANY."""
    hint: str = ""
    """What would make it faster on this machine, in one sentence."""
    fingerprint: str = ""
    """What computes its replies (`engines.fingerprint`): stored with each of them."""


class EngineState(StrEnum):
    READY = "ready"
    STARTING = "starting"
    """For the first time, or again: requests wait."""
    FAILED = "failed"
    """Requests are refused."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether a reply can be made now, and why not."""

    state: EngineState
    reason: str = ""


class EngineGeneration(Protocol):
    """The outputs of one generation, and what may be asked of it while it runs."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    def stop(self) -> None:
        """Ends it within one step; what was said before, and `Ended`, still arrive."""
        ...

    def answer_now(self) -> None:
        """Closes an open thought, from the next token on. `AnswerAsked` tells which one that is."""
        ...


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def status(self) -> EngineStatus:
        """Whether a reply can be made now."""
        ...

    def generate(
        self, prompt: Prompt, sampling: Sampling, choice: int = 0
    ) -> AbstractAsyncContextManager[EngineGeneration]:
        """Opens one generation. Its owner leaves the context to end it: that cancels it within one step.

        Yields `Queued` (any number), `Prefilled`, `Step`s and at last `Ended`, or raises a PalaverError; `AnswerAsked`
        where `answer_now` was called.
        The tokens depend on the prompt, the sampling and `choice` alone: everything of the reply so far is
        restored from `prompt.reply_ids`. Where those already end the reply, only `Ended` comes.
        """
        ...

    async def counted(self) -> dict[str, float]:
        """What it does and holds just now, and what it did since the start, by name; may be empty."""
        ...

    async def forget(self, conversation: str) -> None:
        """Frees what it keeps of prompts of this name and no other one shares. What runs goes on."""
        ...

    async def close(self) -> None:
        """Ends every generation and frees the model. May be called twice."""
        ...


BATCHED = "batched"
EXACTNESS = {BY_TEXT: "exact", BY_CACHE: "exact-with-cache", BY_COMPANY: BATCHED}
"""`EngineInfo.exactness` in a word."""
COMPILED_RUNNER = "compiled"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Written as its six fields with slashes between, such as compiled/1f0c…/cpu/float32/exact/sampler-1."""

    runner: str
    """Whose code runs the model: compiled, fused or library."""
    build: str
    """The build of that code: a hash, or the library's version and what it uses of the processor."""
    device: str
    dtype: str
    exactness: str
    """One of EXACTNESS: what the bits of a reply depend on."""
    sampler: str
    """The version of the rules by which a token is drawn."""

    def __str__(self) -> str:
        fields = (self.runner, self.build, self.device, self.dtype, self.exactness, self.sampler)
        return "/".join(field.replace("/", "-").replace(" ", "-") for field in fields)

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """None for a text of another form, such as that of an engine that is none of these."""
        fields = text.split("/")
        return cls(*fields) if len(fields) == 6 else None
