"""The engine protocol: token ids in, token ids out. Every engine implements it, in this process or hosted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from palaver.errors import BadParameter, ContextOverflow
from palaver.generation import MediaExpansion, MediaItem, Output, Prompt
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
EXACT_CACHE = "kv-f32"
"""In llama.cpp's fingerprints: the cache of its exact mode."""
MLX_RUNNER = "mlx"
DIFFUSION_RUNNER = "diffusion"
VLLM_RUNNER = "vllm"
REMOTE_RUNNER = "remote"
NATIVE_SAMPLER = "native"
"""In place of the version of Palaver's sampler: that of vLLM or of a server."""
APPROXIMATE_RUNNER = "diffusion-approximate"
"""The same with `EngineOptions.approximate_cache`."""


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
    FILTERS = "filters"
    """Filters such as `top_p`, penalties and DRY. The refusal names the parameter."""
    MEDIA = "media"
    """Pictures for a model that sees, where the engine could show it none. The refusal says why."""
    EXACT_CONTINUATION = "exact_continuation"
    """A sampled reply that was stopped goes on as if it had not been. Without it no request is refused."""
    OWNER_ISOLATION = "owner_isolation"
    """Owners share no cached prefix. Without it no request is refused."""


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
    """What the prefix cache can reuse: "to the token", "snapshots", "approximate" and how, or "none" and why."""
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
    block_length: int | None = None
    """Diffusion models: the tokens of a block, which is denoised as a whole and comes at once. None: the model writes
    token by token, and parameters of diffusion are refused."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """The text that the model's processor expands, by kind of media: for templates that don't write it."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """The text that the model's processor writes before the tokens of an item, by kind of media, with the item's number
    for `{}`: how many of its kind are before it in the prompt."""
    sample_rate: int = 0
    """Samples per second of the sound that the model hears."""
    max_sound_samples: int = 0
    """The longest sound that it hears at once; a longer one is refused. 0: no limit."""
    media_options: tuple[str, ...] = ()
    """Parameters of `MediaItem.options` that the model's processor knows for pictures."""
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
    if info.block_length is None:
        _check_no_diffusion(prompt, sampling)
    for capability, needed in needs.items():
        if needed and capability in info.lacks:
            raise BadParameter(
                capability.value, info.model, f"the engine of this model can't do this: {info.lacks[capability]}."
            )


def _check_no_diffusion(prompt: Prompt, sampling: Sampling) -> None:
    if prompt.canvas:
        raise BadParameter("text", "[MASK]", "masks are for diffusion models; this one writes token by token.")
    neutral = Sampling()
    for name in ("steps", "block_length", "remasking"):
        if (value := getattr(sampling, name)) != getattr(neutral, name):
            raise BadParameter(name, value, "is for diffusion models; this one writes token by token.")


def check_prompt(info: EngineInfo, prompt: Prompt) -> None:
    """Raises a RequestError if the model can't take the prompt."""
    if len(prompt) == 0:
        raise BadParameter("prompt", (), "must have at least one token")
    if len(prompt) > info.context_length:
        raise ContextOverflow(len(prompt), info.context_length)
    for span in prompt.media:
        if span.item.kind not in info.media:
            raise BadParameter("media", span.item.kind, f"the model {info.model!r} does not take it")
        if not (0 <= span.start < span.stop <= len(prompt.context_ids)):
            raise BadParameter("media", span.start, "is not a place in the prompt")
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
        A diffusion model yields the `Step`s of a whole block at once, after its `Draft`s.
        Raises a PalaverError if it fails.

        The tokens depend on the prompt, the sampling and `choice` alone: the state of a continued reply is restored
        from `prompt.reply_ids`. If those already end the reply, only `Ended` is yielded.
        """
        ...

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        """The tokens that stand for the item in a prompt. Depends on the item alone.

        Blocks while the item is decoded and processed: call it in a thread, never in the event loop. Raises
        UnsupportedContent if the model can't take it.
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
    """Which code runs the model: compiled, fused, library, llama.cpp, mlx, diffusion, diffusion-approximate, vllm or
    remote."""
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
