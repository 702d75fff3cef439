"""The engine of diffusion models, behind the same protocol as the others: loads a folder, checks requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from palaver.engines.base import (
    APPROXIMATE_RUNNER,
    BY_BATCH,
    BY_TEXT,
    DIFFUSION_RUNNER,
    EXACTNESS_LABELS,
    Capability,
    EngineInfo,
    EngineState,
    EngineStatus,
    Fingerprint,
    check_capabilities,
    check_prompt,
)
from palaver.engines.core.engine import Worker
from palaver.engines.core.generation import CloseCommand, Command, ForgetCommand, LocalGeneration, Outbox
from palaver.engines.core.options import EngineOptions, check_cache_bytes
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.runner import SMALL_MODEL, UnsupportedModel
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.diffusion.block import Block, BlockRules
from palaver.engines.diffusion.config import (
    GEMMA,
    NO_MASK_TOKEN,
    DiffusionConfig,
    Visibility,
    find_diffusion,
    read_diffusion_config,
)
from palaver.engines.diffusion.gemma import CanvasBlock, GemmaScheduler, gemma_config, load_gemma
from palaver.engines.diffusion.model import DiffusionModel
from palaver.engines.diffusion.scheduler import BlockLayout, DenoisingSequence, DiffusionScheduler
from palaver.engines.torch.devices import TorchThreads, cache_bytes, check_fit, free_bytes, pick_device, pick_dtype
from palaver.engines.torch.loader import (
    context_length,
    end_ids,
    load_model,
    merge_adapter,
    open_checkpoint,
)
from palaver.errors import BadParameter, BrokenModel, ContextOverflow, UnsupportedContent
from palaver.generation import MediaExpansion, MediaItem, Prompt
from palaver.phases import Vocabulary
from palaver.sampling import Sampling, check_sampling

ONE_BY_ONE = "it writes many tokens at once, and this needs the tokens before each"
LACKS = {
    Capability.CONSTRAINTS: ONE_BY_ONE,
    Capability.TOKEN_HEALING: ONE_BY_ONE,
    Capability.FILTERS: ONE_BY_ONE,
}
SUPPORTED = frozenset(
    "temperature seed max_tokens min_tokens thinking_budget logit_bias banned_ids stop stop_ids logprobs"
    " end_penalty steps block_length remasking".split()
)
"""The sampling parameters of diffusion models. Others must have their neutral values."""
SUPPORTED_BY_GEMMA = SUPPORTED - {"block_length", "remasking", "min_tokens", "end_penalty"}
"""DiffusionGemma's canvas has one length, and its sampler is its own."""
IGNORED = frozenset(("constraint", "dry_sequence_breakers", "dry_base", "dry_allowed_length", "dry_penalty_last_n"))
"""Parameters without effect unless another one is set, and those that `check_capabilities` refuses."""
EXACT_ALREADY = "the blocks of this model see nothing behind them, so what it reuses is exact already."
SAMPLER = "denoiser-1"
"""The version of the rules that choose tokens."""


class DiffusionEngine:
    """Generates token ids with one diffusion model, in a thread of its own."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        model: DiffusionModel | PreTrainedModel,
        config: DiffusionConfig,
        cache_bytes: int,
        limits: SchedulerLimits | None = None,
        batched: bool = False,
        approximate: bool = False,
        threads: TorchThreads | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`model`: that of DiffusionGemma as the library loads it, or any other one."""
        self._info = info
        self._vocabulary = vocabulary
        self._model = model
        self._config = config
        outbox = Outbox()
        self._make_block: Callable[..., Block] = Block
        self._scheduler: DiffusionScheduler
        limits = limits or SchedulerLimits()
        if isinstance(model, DiffusionModel):
            self._scheduler = DiffusionScheduler(
                model, config, outbox, self._sequence, cache_bytes, limits, batched, approximate
            )
        else:
            self._make_block = partial(CanvasBlock, model=model)
            self._scheduler = GemmaScheduler(model, config, outbox, self._sequence, limits)
        self._worker = Worker(self._scheduler, outbox, _thread_context(threads), on_failure)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        reason = self._worker.exit_reason
        return EngineStatus(EngineState.READY) if reason is None else EngineStatus(EngineState.FAILED, str(reason))

    async def metrics(self) -> dict[str, float]:
        running, waiting = self._scheduler.counts
        return {"running": running, "waiting": waiting, **asdict(self._scheduler.cache.statistics)}

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> LocalGeneration:
        check_capabilities(self._info, prompt, sampling, choice)
        _check_parameters(
            check_sampling(sampling), SUPPORTED if self._config.mask_id is not None else SUPPORTED_BY_GEMMA
        )
        self._check_canvas(prompt, sampling)
        return LocalGeneration(prompt, sampling, choice, self._post)

    def _check_canvas(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raises a RequestError for a text that can't be filled in, and for parameters without effect on it."""
        if not prompt.canvas:
            return
        for name in ("max_tokens", "min_tokens", "block_length", "stop", "stop_ids"):
            if value := getattr(sampling, name):
                raise BadParameter(name, value, "is not for texts with masks, whose length is given.")
        if self._config.mask_id is None:
            raise BadParameter("text", "[MASK]", "this model starts from random tokens and fills no masks.")
        if None not in prompt.canvas:
            raise BadParameter("text", "", "must have at least one [MASK]")
        if len(prompt.context_ids) + len(prompt.canvas) > self._info.context_length:
            raise ContextOverflow(len(prompt.context_ids) + len(prompt.canvas), self._info.context_length)

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        raise UnsupportedContent(f"The model {self._info.model!r} takes text only.")

    def _post(self, command: Command) -> None:
        self._worker.post(command)

    async def forget(self, conversation: str) -> None:
        forgotten = threading.Event()
        self._worker.post(ForgetCommand(conversation, forgotten.set))
        await asyncio.to_thread(forgotten.wait)

    async def close(self) -> None:
        self._worker.post(CloseCommand())
        await asyncio.to_thread(self._worker.join)
        if isinstance(self._model, DiffusionModel):
            self._model.close()

    def warm_grammars(self) -> None:
        """There are none."""

    def _sequence(self, generation: LocalGeneration) -> DenoisingSequence:
        prompt, sampling = generation.prompt, generation.sampling
        check_prompt(self._info, prompt)
        room = self._info.context_length - len(prompt.context_ids)
        if self._config.attention is Visibility.BIDIRECTIONAL:
            room = min(room, sampling.max_tokens or self._config.tokens)
            sampling = replace(sampling, max_tokens=room)
        if prompt.canvas:
            room = len(prompt.canvas)
            sampling = replace(sampling, max_tokens=room, min_tokens=0, block_length=room)
        if self._config.mask_id is None:
            room += self._info.block_length or 0  # a canvas is always whole
        layout = BlockLayout(min(sampling.block_length or self._config.block_length or room, max(1, room)), room)

        def make_reply(ids: Sequence[int]) -> ReplyState:
            given = replace(prompt, reply_ids=tuple(ids))
            return ReplyState(given, sampling, self._vocabulary, self._info.end_ids, self._info.context_length)

        whole = make_reply(prompt.reply_ids)
        sequence = DenoisingSequence(generation, layout, self._rules(generation, whole), make_reply, self._make_block)
        if whole.ended is not None:
            sequence.reply = whole
        return sequence

    def _rules(self, generation: LocalGeneration, reply: ReplyState) -> BlockRules:
        sampling, size = generation.sampling, self._info.vocabulary_size
        bias = torch.zeros(size, device=self._model.device)
        for ids, name in ((sampling.banned_ids, "banned_ids"), ([id for id, _ in sampling.logit_bias], "logit_bias")):
            if any(not 0 <= id < size for id in ids):
                raise BadParameter(name, max(ids), f"token ids go from 0 to {size - 1}")
        for id, value in sampling.logit_bias:
            bias[id] += value
        masks = () if self._config.mask_id is None else (self._config.mask_id,)
        ends_banned = reply.stop_token_ids if generation.prompt.canvas else ()
        bias[[*sampling.banned_ids, *masks, *ends_banned]] = -torch.inf
        bias[len(self._vocabulary) :] = -torch.inf
        ends = torch.tensor(sorted(reply.stop_token_ids), dtype=torch.long, device=self._model.device)
        steps = sampling.steps or self._config.steps
        return BlockRules(sampling, generation.choice, steps, self._config.mask_id, bias, ends)


def _check_parameters(sampling: Sampling, supported: frozenset[str]) -> None:
    """Raises BadParameter for a parameter that would have no effect."""
    neutral = Sampling()
    for name in Sampling.__dataclass_fields__:
        value = getattr(sampling, name)
        if name not in supported | IGNORED and value != getattr(neutral, name):
            raise BadParameter(name, value, f"is not for diffusion models: {ONE_BY_ONE}.")


def _thread_context(threads: TorchThreads | None) -> Callable[[], Any]:
    @contextmanager
    def context() -> Iterator[None]:
        if threads is not None:
            threads.apply()
        with torch.inference_mode():
            yield

    return context


def load(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    trained: Mapping[str, Any] | None = None,
    device: str | None = None,
    dtype: str | None = None,
    options: EngineOptions | None = None,
    adapter: Path | None = None,
    quantize_bits: int | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> DiffusionEngine:
    """Loads a diffusion model from a folder and starts its thread. Raises a ModelError where that fails.

    `trained`: the settings of the training configuration that named the model, instead of its own.
    """
    options = options or EngineOptions()
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    checkpoint = open_checkpoint(model)
    settings = find_diffusion(checkpoint.folder, trained)
    if settings is None:
        raise BrokenModel(NO_MASK_TOKEN.format(name=checkpoint.folder.name))
    check_fit(checkpoint, torch_device, torch_dtype)
    if checkpoint.config.get("model_type") == GEMMA:
        if adapter is not None or quantize_bits is not None:
            raise BrokenModel("DiffusionGemma is run without adapters, and with the weights as they are.")
        gemma = load_gemma(checkpoint, torch_device, torch_dtype)
        return model_engine(checkpoint.name, gemma, gemma_config(gemma), vocabulary, options, on_failure)
    loaded = load_model(checkpoint, torch_device, torch_dtype, quantize_bits)
    if adapter is not None:
        loaded = merge_adapter(loaded, adapter)
    check_cache_bytes(options, free_bytes(torch_device), str(torch_device))
    config = read_diffusion_config(checkpoint.folder, settings, _vocabulary_size(loaded))
    return model_engine(checkpoint.name, loaded, config, vocabulary, options, on_failure)


def _vocabulary_size(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return int(model.config.get_text_config().vocab_size if head is None else head.weight.shape[0])


def model_engine(
    name: str,
    model: PreTrainedModel,
    config: DiffusionConfig,
    vocabulary: Vocabulary,
    options: EngineOptions,
    on_failure: Callable[[BaseException], None] | None = None,
) -> DiffusionEngine:
    """An engine for a loaded model. Raises BadParameter for an approximate cache that it has no use for."""
    if options.approximate_cache and config.attention is Visibility.BLOCK_CAUSAL:
        raise BadParameter("--approximate-cache", name, EXACT_ALREADY)
    small = sum(p.nbytes for p in model.parameters()) <= SMALL_MODEL
    limits = options.limits or SchedulerLimits()
    if options.max_running is not None:
        limits = replace(limits, max_running=options.max_running)
    try:
        runner = model if config.mask_id is None else DiffusionModel(model)
    except UnsupportedModel as error:
        raise BrokenModel(f"{name} can't be run as a diffusion model: {error}.") from error
    window = runner.window if isinstance(runner, DiffusionModel) else None
    return DiffusionEngine(
        engine_info(name, model, config, options, window),
        vocabulary,
        runner,
        config,
        cache_bytes(model.device) if options.cache_bytes is None else options.cache_bytes,
        limits,
        batched=model.device.type != "cpu",
        approximate=options.approximate_cache,
        threads=TorchThreads.choose(options.threads, small),
        on_failure=on_failure,
    )


def engine_info(
    name: str, model: PreTrainedModel, config: DiffusionConfig, options: EngineOptions, window: int | None
) -> EngineInfo:
    """On the CPU company changes no bit of a reply. The filters of left-to-right sampling are no defaults here.

    A text is no longer than the sliding window of the model: what a block sees beyond it was never defined.
    """
    device = model.device
    exactness = BY_TEXT if device.type == "cpu" else BY_BATCH
    unit = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    dtype, build = str(model.dtype).removeprefix("torch."), f"torch-{torch.__version__}-{unit}"
    runner = APPROXIMATE_RUNNER if options.approximate_cache else DIFFUSION_RUNNER
    fingerprint = Fingerprint(runner, build, device.type, dtype, EXACTNESS_LABELS[exactness], SAMPLER)
    return EngineInfo(
        model=name,
        context_length=min(filter(None, (context_length(model), options.context, window))),
        vocabulary_size=_vocabulary_size(model),
        end_ids=end_ids(model),
        defaults=Sampling(temperature=config.temperature),
        device=str(device),
        dtype=dtype,
        reuse=_reuse(config, options.approximate_cache),
        exactness=exactness,
        fingerprint=str(fingerprint),
        lacks=LACKS,
        block_length=config.block_length or config.tokens,
    )


def _reuse(config: DiffusionConfig, approximate: bool) -> str:
    if approximate:
        return "approximate: the text before a block is computed once a block"
    if config.mask_id is None:
        return "within a reply: the library's encoder reads each prompt and each finished canvas once"
    if config.attention is Visibility.BLOCK_CAUSAL:
        return "whole chunks of the prompt"
    return "none: every token sees the whole text"
