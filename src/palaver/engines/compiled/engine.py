"""Loads decoders for compiled steps from their files, with numpy alone: torch and transformers are not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from palaver.engines.base import BY_TEXT, COMPILED, COMPILED_RUNNER, EXACTNESS_LABELS, Fingerprint
from palaver.engines.compiled.build import Library, start_build
from palaver.engines.compiled.decoder import TABLE_VERSION, CompiledDecoder, CompiledRunner, DecoderSizes, RotaryTable
from palaver.engines.compiled.weights import QUANTISED, held_bytes, read_weights
from palaver.engines.core.checkpoint import Checkpoint, open_checkpoint
from palaver.engines.core.decoder_config import DecoderConfig, decoder_info, read_decoder_config
from palaver.engines.core.draft_model import RunnerDraftModel
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.gguf_checkpoint import open_gguf_checkpoint
from palaver.engines.core.gguf_metadata import weights_type
from palaver.engines.core.options import EngineOptions, Fit, divide_cache, host_cache_bytes
from palaver.engines.core.runner import SMALL_MODEL, ThreadCounts
from palaver.engines.core.sampler import SAMPLER_VERSION
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.memory import available_bytes, give_back_unused
from palaver.phases import Vocabulary

DEVICE, DTYPE = "cpu", "float32"


def load(
    model: str | Path,
    *,
    vocabulary: Vocabulary,
    options: EngineOptions | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> LocalEngine:
    """Loads a model from a folder or a GGUF file and starts its thread.

    Raises UnsupportedModel unless its configuration is that of a decoder that they know, CantCompile where there is no
    compiled code, and a ModelError where its files can't be loaded.
    """
    options = options or EngineOptions()
    checkpoint, config = open_decoder(model)
    dtype = DTYPE if checkpoint.header is None else weights_type(checkpoint.header)
    info = replace(decoder_info(checkpoint, config, options.context, DEVICE, dtype), steps=COMPILED, exactness=BY_TEXT)
    drafting = None if options.draft_model is None else open_decoder(options.draft_model)
    building = start_build()
    compiled_fit(checkpoint, *(() if drafting is None else drafting[:1])).check(checkpoint.name)
    small = _is_small(checkpoint)
    threads = ThreadCounts.choose(options.threads, small)
    library = building.result()
    decoder = load_decoder(checkpoint, config, library, threads.large_pass)
    if not small:
        give_back_unused()
    draft_decoder = None if drafting is None else load_decoder(*drafting, library, threads.large_pass)
    cache_bytes, draft_model = host_cache_bytes(options), None
    if drafting is not None and draft_decoder is not None:
        cache_bytes, draft_bytes = divide_cache(
            cache_bytes, decoder.layout.bytes_per_token, draft_decoder.layout.bytes_per_token
        )
        length, draft_threads = drafting[1].max_position, ThreadCounts.choose(options.threads, _is_small(drafting[0]))
        drafter = CompiledRunner(draft_decoder, draft_bytes, length, draft_threads, speculate=False)
        draft_model = RunnerDraftModel(drafter, length, drafting[1].vocabulary_size, info.vocabulary_size)
    runner = CompiledRunner(decoder, cache_bytes, info.context_length, threads, options.drafts is not False)
    runner.draft_model = draft_model
    info = replace(info, reuse=runner.reuse, fingerprint=str(compiled_fingerprint(library, dtype)))
    return LocalEngine(info, vocabulary, runner, _limits(options, small), on_failure=on_failure)


def open_decoder(model: str | Path) -> tuple[Checkpoint, DecoderConfig]:
    """Reads the headers of a model's folder or GGUF file. Raises UnsupportedModel and ModelError."""
    path = Path(model).expanduser()
    checkpoint = open_gguf_checkpoint(path) if path.is_file() else open_checkpoint(model)
    config = read_decoder_config(checkpoint, QUANTISED)
    DecoderSizes.of(config).check(config.hidden_size)
    return checkpoint, config


def load_decoder(checkpoint: Checkpoint, config: DecoderConfig, library: Library, max_threads: int) -> CompiledDecoder:
    rotary = RotaryTable(config.frequencies, config.max_position)
    local = None if config.local_frequencies is None else RotaryTable(config.local_frequencies, config.max_position)
    weights = read_weights(checkpoint, config)
    return CompiledDecoder(weights, DecoderSizes.of(config), rotary, library, max_threads, local)


def describe_fit(model: str | Path) -> str:
    """One sentence on whether the model would fit. Raises as `load` does, but builds and loads nothing."""
    checkpoint, _ = open_decoder(model)
    return str(compiled_fit(checkpoint))


def compiled_fingerprint(library: Library, dtype: str = DTYPE) -> Fingerprint:
    build = f"{library.build}-rope-{TABLE_VERSION}"
    return Fingerprint(COMPILED_RUNNER, build, DEVICE, dtype, EXACTNESS_LABELS[BY_TEXT], f"sampler-{SAMPLER_VERSION}")


def compiled_fit(*checkpoints: Checkpoint) -> Fit:
    weights = sum(held_bytes(tensor) for checkpoint in checkpoints for tensor in checkpoint.tensors.values())
    return Fit.of(weights, available_bytes(), DEVICE)


def _is_small(checkpoint: Checkpoint) -> bool:
    return 4 * sum(tensor.elements for tensor in checkpoint.tensors.values()) <= SMALL_MODEL


def _limits(options: EngineOptions, small: bool) -> SchedulerLimits:
    """By default a chunk of a prompt takes a small part of a second."""
    limits = options.limits or SchedulerLimits(chunk_tokens=128 if small else 32)
    return limits if options.max_running is None else replace(limits, max_running=options.max_running)
