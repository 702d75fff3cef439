"""The torch engine: loads a model, picks its runner and starts its worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from palaver.engines.base import (
    COMPILED,
    EXACTNESS_LABELS,
    EngineInfo,
    Fingerprint,
)
from palaver.engines.compiled.build import NO_COMPILER, Library, start_build
from palaver.engines.compiled.engine import compiled_fingerprint
from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.fit import check_cache_bytes
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.core.threads import SMALL_MODEL
from palaver.engines.torch.checkpoint import open_checkpoint
from palaver.engines.torch.device_sampler import sampler_version
from palaver.engines.torch.loader import (
    context_length,
    end_ids,
    load_model,
    merge_adapter,
    pick_device,
    pick_dtype,
    sampling_defaults,
)
from palaver.engines.torch.memory import TorchThreads, cache_bytes, check_fit, fit, free_bytes
from palaver.engines.torch.probe import FEW_OPERATIONS, pick_runner
from palaver.errors import CantCompile
from palaver.memory import give_back_unused
from palaver.phases import Vocabulary

NO_COMPILER_HINT = "No C compiler was found: with gcc or clang installed, replies come several times as fast."


def load(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    device: str | None = None,
    dtype: str | None = None,
    options: EngineOptions | None = None,
    adapter: Path | None = None,
    quantize_bits: int | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TorchEngine:
    """Loads a model from a folder and starts its thread. Raises a ModelError where that fails.

    `vocabulary` holds the bytes of each token id: stop strings, banned strings and text markers are bytes. `adapter` is
    the folder of a LoRA adapter that is merged into the weights. With `quantize_bits` (4 or 8) the weights are
    quantised when they are loaded. `on_failure` is called when the engine's thread dies.
    """
    checkpoint = open_checkpoint(model)
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    options = options or EngineOptions()
    check_fit(checkpoint, torch_device, torch_dtype, compiled=bool(options.compiled))
    compiled = options.compiled if options.fused else False
    library = _start_library_build(checkpoint, torch_device, torch_dtype, compiled)
    loaded = load_model(checkpoint, torch_device, torch_dtype, quantize_bits)
    if adapter is not None:
        loaded = merge_adapter(loaded, adapter)
    check_cache_bytes(options, free_bytes(torch_device), str(torch_device))
    big = not _is_small(loaded)
    engine = TorchEngine(checkpoint.name, loaded, vocabulary, options, library, on_failure)
    del loaded  # compiled steps hold a copy of the weights: then these can be freed
    if big:
        give_back_unused()
    return engine


class TorchEngine(LocalEngine):
    """Runs a model with torch on one device."""

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
        info = _info(name, model)
        if options.context is not None:
            info = replace(info, context_length=min(info.context_length, options.context))
        cache_limit = cache_bytes(model.device) if options.cache_bytes is None else options.cache_bytes
        threads = TorchThreads.choose(options.threads, _is_small(model))
        runner, steps, exactness = pick_runner(
            model, info.vocabulary_size, cache_limit, info.context_length, options, threads, library
        )
        hint = NO_COMPILER_HINT if steps.endswith(NO_COMPILER) else ""
        info = replace(info, reuse=runner.reuse, steps=steps, exactness=exactness, hint=hint)
        build = library.result() if library is not None and steps == COMPILED else None
        fingerprint = _fingerprint(model, info) if build is None else compiled_fingerprint(build)
        info = replace(info, fingerprint=str(fingerprint))
        super().__init__(info, vocabulary, runner, _limits(model, options), _thread_context(threads), on_failure)


def _thread_context(threads: TorchThreads) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def context() -> Iterator[None]:
        threads.apply()
        with torch.inference_mode():
            yield

    return context


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


def _fingerprint(model: PreTrainedModel, info: EngineInfo) -> Fingerprint:
    device, exactness = model.device.type, EXACTNESS_LABELS[info.exactness]
    sampler = f"sampler-{sampler_version(model.device)}"
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
