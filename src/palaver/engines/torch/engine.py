"""The torch engine: loads a model, picks its runner and starts its worker thread.

A plain decoder that its configuration identifies is loaded by `plain_engine.py`, without the transformers library; all
other models by `library_engine.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from palaver.engines.base import COMPILED, EXACTNESS_LABELS, EngineInfo, Fingerprint
from palaver.engines.compiled.build import NO_COMPILER, Library, start_build
from palaver.engines.compiled.engine import compiled_fingerprint
from palaver.engines.core.checkpoint import Checkpoint, open_checkpoint
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import Runner, UnsupportedModel
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.torch.device_sampler import sampler_version
from palaver.engines.torch.devices import pick_device, pick_dtype
from palaver.engines.torch.forward_probe import FEW_OPERATIONS
from palaver.engines.torch.memory import TorchThreads, fit
from palaver.errors import BrokenModel, CantCompile, UnknownModel
from palaver.phases import Vocabulary

NO_COMPILER_HINT = "No C compiler was found: with gcc or clang installed, replies come several times as fast."

SWITCH_SECONDS = 5e-5
"""How long a thread that encodes outputs may hold Python's lock while the engine's thread, back from its device, waits
for it. With Python's default, 5 ms, the device would be idle meanwhile."""


class TorchEngine(LocalEngine):
    """Runs a model with torch on one device."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        runner: Runner,
        options: EngineOptions,
        threads: TorchThreads,
        small: bool,
        library: Future[Library] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`info` lacks what follows from the runner. `small`: whether the model is a small one. `library`: the code of
        compiled steps; None where they are off."""
        hint = NO_COMPILER_HINT if info.steps.endswith(NO_COMPILER) else ""
        info = replace(info, reuse=runner.reuse, hint=hint)
        build = library.result() if library is not None and info.steps == COMPILED else None
        fingerprint = _fingerprint(info) if build is None else compiled_fingerprint(build)
        info = replace(info, fingerprint=str(fingerprint))
        limits = _limits(options, torch.device(info.device), small)
        on_host = torch.device(info.device).type == "cpu"
        super().__init__(info, vocabulary, runner, limits, _thread_context(threads, on_host), on_failure)


def _thread_context(threads: TorchThreads, on_host: bool) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def context() -> Iterator[None]:
        threads.apply()
        if not on_host:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        with torch.inference_mode():
            yield

    return context


def _fingerprint(info: EngineInfo) -> Fingerprint:
    device = torch.device(info.device)
    runner = "fused" if info.steps.startswith(FEW_OPERATIONS) else "library"
    unit = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    build, sampler = f"torch-{torch.__version__}-{unit}", f"sampler-{sampler_version(device)}"
    return Fingerprint(runner, build, device.type, info.dtype, EXACTNESS_LABELS[info.exactness], sampler)


def _limits(options: EngineOptions, device: torch.device, small: bool) -> SchedulerLimits:
    """By default a chunk of a prompt takes a small part of a second."""
    chunk = 1024 if device.type != "cpu" else 128 if small else 32
    limits = options.limits or SchedulerLimits(chunk_tokens=chunk)
    return limits if options.max_running is None else replace(limits, max_running=options.max_running)


def start_library_build(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, options: EngineOptions
) -> Future[Library] | None:
    """Starts to build or load the compiled code in a thread of its own. The future raises CantCompile with the reason
    where that fails. None where compiled steps are off, or by default on devices other than the CPU."""
    compiled = options.compiled if options.fused else False
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
    from palaver.engines.torch.plain_engine import load_plain_model

    options = options or EngineOptions()
    if not Path(model).expanduser().is_dir():
        raise UnknownModel(str(model), "there is no such folder.")
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    if adapter is None and quantize_bits is None and options.fused:
        with suppress(UnsupportedModel, BrokenModel):  # which the library's way explains
            return load_plain_model(model, vocabulary, torch_device, torch_dtype, options, on_failure)
    from palaver.engines.torch.library_engine import load_library_model

    return load_library_model(model, vocabulary, torch_device, torch_dtype, options, adapter, quantize_bits, on_failure)


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
