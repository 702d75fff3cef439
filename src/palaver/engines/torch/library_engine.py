"""Loads any model that the transformers library knows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from palaver.engines.base import EngineInfo
from palaver.engines.compiled.build import Library
from palaver.engines.core.options import EngineOptions, check_cache_bytes
from palaver.engines.core.runner import SMALL_MODEL
from palaver.engines.torch.checkpoint import open_checkpoint
from palaver.engines.torch.engine import TorchEngine, start_library_build
from palaver.engines.torch.loader import context_length, end_ids, load_model, merge_adapter, sampling_defaults
from palaver.engines.torch.memory import TorchThreads, cache_bytes, check_fit, free_bytes
from palaver.engines.torch.probe import pick_runner
from palaver.memory import give_back_unused
from palaver.phases import Vocabulary


def load_library_model(
    model: str | Path,
    vocabulary: Vocabulary,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions,
    adapter: Path | None = None,
    quantize_bits: int | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TorchEngine:
    checkpoint = open_checkpoint(model)
    check_fit(checkpoint, device, dtype, compiled=bool(options.compiled))
    library = start_library_build(checkpoint, device, dtype, options)
    loaded = load_model(checkpoint, device, dtype, quantize_bits)
    if adapter is not None:
        loaded = merge_adapter(loaded, adapter)
    check_cache_bytes(options, free_bytes(device), str(device))
    big = not _is_small(loaded)
    engine = model_engine(checkpoint.name, loaded, vocabulary, options, library, on_failure)
    del loaded  # compiled steps hold a copy of the weights: then these can be freed
    if big:
        give_back_unused()
    return engine


def model_engine(
    name: str,
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    options: EngineOptions | None = None,
    library: Future[Library] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TorchEngine:
    """An engine for a loaded model. `library`: the code of compiled steps; None where they are off."""
    options = options or EngineOptions()
    info = _info(name, model)
    if options.context is not None:
        info = replace(info, context_length=min(info.context_length, options.context))
    cache_limit = cache_bytes(model.device) if options.cache_bytes is None else options.cache_bytes
    small = _is_small(model)
    threads = TorchThreads.choose(options.threads, small)
    runner, steps, exactness = pick_runner(
        model, info.vocabulary_size, cache_limit, info.context_length, options, threads, library
    )
    info = replace(info, steps=steps, exactness=exactness)
    return TorchEngine(info, vocabulary, runner, options, threads, small, library, on_failure)


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


def _is_small(model: PreTrainedModel) -> bool:
    return sum(p.nbytes for p in model.parameters()) <= SMALL_MODEL
