"""The engine protocol: token ids in, token ids out. Every engine implements it, in this process or hosted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from palaver.errors import BadParameter, ContextOverflow
from palaver.generation import Output, Prompt
from palaver.sampling import Sampling

COMPILED = "compiled"
BY_TEXT = "depend on the text alone"
BY_CACHE = "depend on the text and on what was cached of it, not on other requests"
BY_BATCH = "may depend on the requests that run beside it"
"""What the bits of a reply depend on, as `EngineInfo.exactness` says it."""
BATCHED = "batched"
EXACTNESS_LABELS = {BY_TEXT: "exact", BY_CACHE: "exact-with-cache", BY_BATCH: BATCHED}
"""The same as one word, as fingerprints say it."""
COMPILED_RUNNER = "compiled"
LLAMACPP_RUNNER = "llama.cpp"
MLX_RUNNER = "mlx"


class Capability(StrEnum):
    """What a request may need and not every engine has. An engine declares in `EngineInfo.lacks` what it can't do."""

    CONSTRAINTS = "constraints"
    """Schemas and grammars for the answer, and tool calls that must come."""
    LOGPROBS = "logprobs"
    """The likeliest tokens beside each token."""
    CHOICES = "choices"
    """Several replies to one prompt."""
    TOKEN_HEALING = "token_healing"
    """Partial replies that end inside a token."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's description of itself and the model it runs."""

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
    """What the prefix cache can reuse: "to the token", "snapshots", or "none" and why."""
    steps: str = "the model's own code"
    """Which code computes the next tokens: "the model's own code", "few operations", either with ", recorded", or
    COMPILED; with the reason why it is not a faster one."""
    exactness: str = BY_BATCH
    """What the bits of a reply depend on: BY_TEXT, BY_CACHE or BY_BATCH. A probe finds it when the model is loaded."""
    hint: str = ""
    """How to make it faster on this machine, in one sentence."""
    fingerprint: str = ""
    """The code that computes the replies (`Fingerprint`); stored with each reply."""
    media: tuple[str, ...] = ()
    """The media that the model accepts besides text: image, audio, video."""
    lacks: Mapping[Capability, str] = field(default_factory=dict)
    """What this engine can't do, and why. A request that needs it is refused (`check_capabilities`)."""


def check_capabilities(info: EngineInfo, prompt: Prompt, sampling: Sampling, choice: int) -> None:
    """Raises BadParameter if the request needs what the engine lacks."""
    needs = {
        Capability.CONSTRAINTS: sampling.constraint is not None or prompt.phases.held is not None,
        Capability.LOGPROBS: sampling.logprobs > 0,
        Capability.CHOICES: choice > 0,
        Capability.TOKEN_HEALING: bool(prompt.healing),
    }
    for capability, needed in needs.items():
        if needed and capability in info.lacks:
            raise BadParameter(
                capability.value, info.model, f"the engine of this model can't do this: {info.lacks[capability]}."
            )


def check_prompt(info: EngineInfo, prompt: Prompt) -> None:
    """Raises a RequestError if the model can't take the prompt."""
    if len(prompt) == 0:
        raise BadParameter("prompt", (), "must have at least one token")
    if len(prompt) > info.context_length:
        raise ContextOverflow(len(prompt), info.context_length)
    for ids in (prompt.context_ids, prompt.reply_ids):
        if ids and not 0 <= min(ids) <= max(ids) < info.vocabulary_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise BadParameter("prompt", wrong, f"token ids go from 0 to {info.vocabulary_size - 1}")


class EngineState(StrEnum):
    READY = "ready"
    STARTING = "starting"
    """The first start, or a restart: requests wait."""
    FAILED = "failed"
    """Requests are refused."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether the engine can generate now, and the reason if not."""

    state: EngineState
    reason: str = ""


class EngineGeneration(Protocol):
    """The outputs of one generation, and its controls while it runs."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    def stop(self) -> None:
        """Ends the generation within one step. Earlier outputs and `Ended` still arrive."""
        ...

    def answer_now(self) -> None:
        """Closes an open thought from the next token on. `AnswerRequested` has that token's position."""
        ...


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def status(self) -> EngineStatus:
        """Whether the engine can generate now."""
        ...

    def generate(
        self, prompt: Prompt, sampling: Sampling, choice: int = 0
    ) -> AbstractAsyncContextManager[EngineGeneration]:
        """Opens one generation. Leaving the context cancels it within one step.

        Yields `Queued` (any number), `Prefilled`, `Step`s, `AnswerRequested` after `answer_now`, and at last `Ended`.
        Raises a PalaverError if it fails.

        The tokens depend on the prompt, the sampling and `choice` alone: the state of a continued reply is restored
        from `prompt.reply_ids`. If those already end the reply, only `Ended` is yielded.
        """
        ...

    async def metrics(self) -> dict[str, float]:
        """The engine's figures by name: current load and cache, and counts since the start. May be empty."""
        ...

    async def forget(self, conversation: str) -> None:
        """Evicts the cached prefixes that only this conversation uses. Running generations are not affected."""
        ...

    async def close(self) -> None:
        """Ends every generation and frees the model. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies the code that computes replies. Its text: compiled/1f0c…/cpu/float32/exact/sampler-2."""

    runner: str
    """Which code runs the model: compiled, fused, library, llama.cpp or mlx."""
    build: str
    """The build of that code: a hash, or the library's version and what it uses of the processor."""
    device: str
    dtype: str
    exactness: str
    """One of `EXACTNESS_LABELS`: what the bits of a reply depend on."""
    sampler: str
    """The version of the sampling rules."""

    def __str__(self) -> str:
        fields = (self.runner, self.build, self.device, self.dtype, self.exactness, self.sampler)
        return "/".join(field.replace("/", "-").replace(" ", "-") for field in fields)

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """None if the text has another form, such as that of a scripted engine."""
        fields = text.split("/")
        return cls(*fields) if len(fields) == 6 else None
