"""The torch engine: loads a model, picks its runner and starts its worker thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from palaver.constraints import Constraint
from palaver.engines.base import (
    COMPILED,
    COMPILED_RUNNER,
    EXACTNESS_LABELS,
    EngineInfo,
    EngineState,
    EngineStatus,
    Fingerprint,
)
from palaver.engines.compiled.build import NO_COMPILER, Library, start_build
from palaver.engines.core.generation import CloseCommand, ForgetCommand, LocalGeneration, Outbox
from palaver.engines.core.grammar import AnswerGrammar, ReplyGrammar, control_ids, reply_constraints
from palaver.engines.core.logits_processors import (
    BannedStrings,
    SpokenText,
    TokenHealing,
    UnspeakableTokens,
    VocabularyIndex,
)
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.request import LogitsProcessor, SequenceState
from palaver.engines.core.runner import CacheStatistics
from palaver.engines.core.sampler import sampler_version
from palaver.engines.core.scheduler import Scheduler, SchedulerLimits
from palaver.engines.core.worker import Worker
from palaver.engines.grammars import CompiledGrammar, GrammarCache
from palaver.engines.torch.checkpoint import Checkpoint, open_checkpoint
from palaver.engines.torch.loader import (
    context_length,
    end_ids,
    load_model,
    merge_adapter,
    pick_device,
    pick_dtype,
    sampling_defaults,
)
from palaver.engines.torch.memory import ThreadCounts, cache_bytes, check_fit, fit, free_bytes
from palaver.engines.torch.probe import FEW_OPERATIONS, pick_runner
from palaver.errors import BadParameter, CantCompile, ContextOverflow
from palaver.generation import Prompt
from palaver.memory import give_back_unused
from palaver.phases import Vocabulary
from palaver.sampling import Sampling, check_sampling

NO_COMPILER_HINT = "No C compiler was found: with gcc or clang installed, replies come several times as fast."
SMALL_MODEL = 256 << 20
"""Bytes of weights up to which more threads cost more than they gain."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    running: int
    waiting: int
    cache: CacheStatistics
    thread_seconds: float
    """CPU time of the engine's thread since the start."""
    forward_seconds: float
    """The part of it in the model's forward passes."""


def load(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    device: str | None = None,
    dtype: str | None = None,
    options: EngineOptions | None = None,
    adapter: Path | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TorchEngine:
    """Loads a model from a folder and starts its thread. Raises a ModelError where that fails.

    `vocabulary` holds the bytes of each token id: stop strings, banned strings and text markers are bytes. `adapter` is
    the folder of a LoRA adapter that is merged into the weights. `on_failure` is called when the engine's thread dies.
    """
    checkpoint = open_checkpoint(model)
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    options = options or EngineOptions()
    check_fit(checkpoint, torch_device, torch_dtype, compiled=bool(options.compiled))
    compiled = options.compiled if options.fused else False
    library = _start_library_build(checkpoint, torch_device, torch_dtype, compiled)
    loaded = load_model(checkpoint, torch_device, torch_dtype)
    if adapter is not None:
        loaded = merge_adapter(loaded, adapter)
    _check_cache_bytes(options, torch_device)
    big = not _is_small(loaded)
    engine = TorchEngine(checkpoint.name, loaded, vocabulary, options, library, on_failure)
    del loaded  # compiled steps hold a copy of the weights: then these can be freed
    if big:
        give_back_unused()
    return engine


class TorchEngine:
    """Generates token ids with one model on one device."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        vocabulary: Vocabulary,
        options: EngineOptions | None = None,
        library: Future[Library] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`library`: the code of compiled steps; None where they are off. `on_failure` is called in the engine's thread
        when an error ends it."""
        options = options or EngineOptions()
        self._vocabulary = vocabulary
        self._vocabulary_index = VocabularyIndex(vocabulary)
        self._unspeakable: UnspeakableTokens | None = None
        self._grammars = GrammarCache(vocabulary)
        info = _info(name, model)
        if options.context is not None:
            info = replace(info, context_length=min(info.context_length, options.context))
        cache_limit = cache_bytes(model.device) if options.cache_bytes is None else options.cache_bytes
        threads = ThreadCounts.choose(options.threads, _is_small(model))
        self._runner, steps, exactness = pick_runner(
            model, info.vocabulary_size, cache_limit, info.context_length, options, threads, library
        )
        hint = NO_COMPILER_HINT if steps.endswith(NO_COMPILER) else ""
        build = library.result().build if library is not None and steps == COMPILED else ""
        info = replace(info, reuse=self._runner.reuse, steps=steps, exactness=exactness, hint=hint)
        self._info = replace(info, fingerprint=str(_fingerprint(model, info, build)))
        outbox = Outbox()
        self._scheduler = Scheduler(self._runner, outbox, self._sequence, _limits(model, options))
        self._worker = Worker(self._scheduler, outbox, threads.apply, on_failure)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        reason = self._worker.exit_reason
        return EngineStatus(EngineState.READY) if reason is None else EngineStatus(EngineState.FAILED, str(reason))

    @property
    def statistics(self) -> EngineStatistics:
        running, waiting = self._scheduler.counts
        return EngineStatistics(
            running, waiting, self._runner.statistics, self._worker.seconds, self._runner.forward_seconds
        )

    async def metrics(self) -> dict[str, float]:
        now = self.statistics
        return {"running": now.running, "waiting": now.waiting, **asdict(now.cache)}

    def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> LocalGeneration:
        constrained = reply_constraints(prompt.phases, sampling)
        grammars: dict[Constraint, CompiledGrammar] = {}

        async def prepare() -> None:
            for constraint in constrained:
                grammars[constraint] = await self._grammars.compile(constraint)
            if sampling.spoken and self._unspeakable is None:
                await asyncio.to_thread(self._unspeakable_tokens)
            if sampling.banned_strings:
                await asyncio.to_thread(self._index_strings, sampling.banned_strings)

        needed = constrained or sampling.banned_strings or (sampling.spoken and self._unspeakable is None)
        ready = prepare if needed else None
        return LocalGeneration(prompt, check_sampling(sampling), choice, self._worker.post, ready, grammars)

    async def forget(self, conversation: str) -> None:
        forgotten = threading.Event()
        self._worker.post(ForgetCommand(conversation, forgotten.set))
        await asyncio.to_thread(forgotten.wait)

    async def close(self) -> None:
        self._worker.post(CloseCommand())
        await asyncio.to_thread(self._worker.join)
        await asyncio.to_thread(self._grammars.close)

    def warm_grammars(self) -> None:
        """Prepares the grammar compiler. Takes up to a second: don't call it in the event loop."""
        self._grammars.warm()

    def _sequence(self, generation: LocalGeneration) -> SequenceState:
        """The state of a generation, before its partial reply is replayed."""
        prompt, sampling = generation.prompt, generation.sampling
        self._check_prompt(prompt)
        reply = ReplyState(
            replace(prompt, reply_ids=()), sampling, self._vocabulary, self._info.end_ids, self._info.context_length
        )
        banned, grammar = self._banned(prompt, sampling), self._grammar(generation)
        size = self._info.vocabulary_size
        spoken_text = self._spoken_text(prompt, sampling)
        processor = LogitsProcessor(prompt, sampling, generation.choice, reply, size, banned, grammar, spoken_text)
        return SequenceState(generation, processor, self._token_healing(prompt))

    def _check_prompt(self, prompt: Prompt) -> None:
        size = self._info.vocabulary_size
        if len(prompt) == 0:
            raise BadParameter("prompt", (), "must hold at least one token")
        if len(prompt) > self._info.context_length:
            raise ContextOverflow(len(prompt), self._info.context_length)
        for ids in (prompt.context_ids, prompt.reply_ids):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise BadParameter("prompt", wrong, f"token ids here go from 0 to {size - 1}")

    def _index_strings(self, strings: Iterable[str]) -> None:
        """Computes the tokens that complete banned strings, off the engine's thread; the index caches them."""
        for string in strings:
            self._vocabulary_index.completions(string.encode())

    def _banned(self, prompt: Prompt, sampling: Sampling) -> BannedStrings | None:
        if not sampling.banned_strings:
            return None
        control = control_ids(prompt.phases) | self._info.end_ids
        return BannedStrings(sampling.banned_strings, self._vocabulary_index, control)

    def _token_healing(self, prompt: Prompt) -> TokenHealing | None:
        if not prompt.healing:
            return None
        return TokenHealing(prompt.healing, self._vocabulary_index, control_ids(prompt.phases) | self._info.end_ids)

    def _grammar(self, generation: LocalGeneration) -> AnswerGrammar | ReplyGrammar | None:
        phases, constraint = generation.prompt.phases, generation.sampling.constraint
        if phases.held is not None:
            return ReplyGrammar(phases, generation.grammars, self._vocabulary_index)
        if constraint is None:
            return None
        return AnswerGrammar(phases, generation.grammars[constraint], self._vocabulary_index)

    def _spoken_text(self, prompt: Prompt, sampling: Sampling) -> SpokenText | None:
        if not sampling.spoken:
            return None
        return SpokenText(prompt.phases, control_ids(prompt.phases) | self._info.end_ids, self._unspeakable_tokens())

    def _unspeakable_tokens(self) -> UnspeakableTokens:
        if self._unspeakable is None:
            self._unspeakable = UnspeakableTokens(self._vocabulary_index)
        return self._unspeakable


def _info(name: str, model: PreTrainedModel) -> EngineInfo:
    return EngineInfo(
        model=name,
        context_length=context_length(model),
        vocabulary_size=int(model.get_output_embeddings().weight.shape[0]),
        end_ids=end_ids(model),
        defaults=sampling_defaults(model.generation_config),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _fingerprint(model: PreTrainedModel, info: EngineInfo, build: str) -> Fingerprint:
    """`build`: the hash of the compiled code, where steps are compiled."""
    device, exactness = model.device.type, EXACTNESS_LABELS[info.exactness]
    sampler = f"sampler-{sampler_version(model.device)}"
    if info.steps == COMPILED:
        return Fingerprint(COMPILED_RUNNER, build, device, info.dtype, exactness, sampler)
    runner = "fused" if info.steps.startswith(FEW_OPERATIONS) else "library"
    unit = torch.cuda.get_device_name(model.device) if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return Fingerprint(runner, f"torch-{torch.__version__}-{unit}", device, info.dtype, exactness, sampler)


def _limits(model: PreTrainedModel, options: EngineOptions) -> SchedulerLimits:
    """By default a chunk of a prompt takes a small part of a second."""
    chunk = 1024 if model.device.type != "cpu" else 128 if _is_small(model) else 32
    limits = options.limits or SchedulerLimits(chunk_tokens=chunk)
    return limits if options.max_running is None else replace(limits, max_running=options.max_running)


def _is_small(model: PreTrainedModel) -> bool:
    return sum(p.nbytes for p in model.parameters()) <= SMALL_MODEL


def _start_library_build(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, compiled: bool | None
) -> Future[Library] | None:
    """Starts to build or load the compiled code in a thread of its own. The future raises CantCompile with the reason
    where that fails. None where compiled steps are off, or by default on devices other than the CPU."""
    if compiled is False or (device.type != "cpu" and not compiled):
        return None
    if device.type != "cpu" or dtype != torch.float32:
        return _no_library("they are for float32 on the CPU")
    estimate = fit(checkpoint, device, dtype, compiled=True)
    if not estimate.fits and estimate.free_bytes is not None:
        needed, free = estimate.needed_bytes / 1e9, estimate.free_bytes / 1e9
        return _no_library(f"loading them needs about {needed:.1f} GB of memory, and {free:.1f} GB are free")
    return start_build()


def _check_cache_bytes(options: EngineOptions, device: torch.device) -> None:
    """Raises BadParameter where the cache may grow beyond the memory that is free after loading the model."""
    free = free_bytes(device)
    if options.cache_bytes is not None and free is not None and options.cache_bytes > free:
        size = f"{options.cache_bytes / 1e9:.1f} GB"
        raise BadParameter("--kv-cache-memory", size, f"beside the model {free / 1e9:.1f} GB are free on {device}")


def _no_library(reason: str) -> Future[Library]:
    future: Future[Library] = Future()
    future.set_exception(CantCompile(reason))
    return future


def describe_fit(
    model: str | Path, device: str | None = None, dtype: str | None = None, compiled: bool | None = None
) -> str:
    """One sentence on whether the model would fit, without loading it; with compiled steps where they fit too."""
    checkpoint = open_checkpoint(model)
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    compiles = compiled is not False and torch_dtype == torch.float32
    estimate = fit(checkpoint, torch_device, torch_dtype, compiled=compiles)
    return str(estimate if estimate.fits or compiled else fit(checkpoint, torch_device, torch_dtype))
