"""Loads plain decoders that their configuration identifies, without the transformers library.

Nothing is compared with the library's logits: see `core/decoder_config.py` for what is trusted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from palaver.engines.base import BY_BATCH, BY_TEXT, COMPILED
from palaver.engines.compiled.build import Library
from palaver.engines.compiled.decoder import CompiledRunner
from palaver.engines.core.checkpoint import open_checkpoint
from palaver.engines.core.decoder_config import decoder_info, read_decoder_config
from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.core.options import EngineOptions, check_cache_bytes
from palaver.engines.core.runner import SMALL_MODEL, Runner
from palaver.engines.torch.batch import build_batch, build_block_batch, sequence_chunk
from palaver.engines.torch.decoders.checkpoint import read_plain_decoder
from palaver.engines.torch.decoders.compiled import compile_decoder
from palaver.engines.torch.decoders.plain import FusedDecoder, PlainDecoder
from palaver.engines.torch.engine import TorchEngine, start_library_build
from palaver.engines.torch.exact import probe_exactness
from palaver.engines.torch.forward_probe import (
    FEW_OPERATIONS,
    LENGTH,
    PROBE_BYTES,
    ForwardProbe,
    check_required,
    explain_not_compiled,
    max_difference,
    probe_ids,
)
from palaver.engines.torch.memory import TorchThreads, cache_bytes, check_fit, free_bytes
from palaver.engines.torch.model_runner import Forward, TorchRunner
from palaver.engines.torch.tensors import TensorLayout, TensorMemory
from palaver.memory import give_back_unused
from palaver.phases import Vocabulary


def load_plain_model(
    model: str | Path,
    vocabulary: Vocabulary,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TorchEngine:
    """Raises UnsupportedModel unless the configuration is that of a plain decoder."""
    checkpoint = open_checkpoint(model)
    config = read_decoder_config(checkpoint)
    info = decoder_info(checkpoint, config, options.context, str(device), str(dtype).removeprefix("torch."))
    check_fit(checkpoint, device, dtype, compiled=bool(options.compiled))
    library = start_library_build(checkpoint, device, dtype, options)
    small = dtype.itemsize * sum(tensor.elements for tensor in checkpoint.tensors.values()) <= SMALL_MODEL
    threads = TorchThreads.choose(options.threads, small)
    with torch.inference_mode(), threads.applied():  # for a small model more threads only wait for each other
        parts = read_plain_decoder(checkpoint, config, device, dtype, info.context_length)
        check_cache_bytes(options, free_bytes(device), str(device))
        cache_limit = cache_bytes(device) if options.cache_bytes is None else options.cache_bytes
        picker = _RunnerPicker(parts, config.vocabulary_size, options, threads)
        runner, steps, exactness = picker.pick(cache_limit, library)
    info = replace(info, steps=steps, exactness=exactness)
    engine = TorchEngine(info, vocabulary, runner, options, threads, small, library, on_failure)
    del parts, picker  # compiled steps hold a copy of the weights: then these can be freed
    if not small:
        give_back_unused()
    return engine


class _RunnerPicker:
    def __init__(
        self, parts: PlainDecoder, vocabulary_size: int, options: EngineOptions, threads: TorchThreads
    ) -> None:
        shape = (parts.num_kv_heads, parts.head_dim)
        memory = TensorMemory(parts.embedding.dtype, parts.embedding.device)
        self._parts = parts
        self._layout = TensorLayout(((shape, shape),) * len(parts.layers), memory)
        self._ids = probe_ids(vocabulary_size)
        self._options = options
        self._threads = threads

    def pick(self, cache_limit: int, library: Future[Library] | None) -> tuple[Runner, str, str]:
        """The runner, whose code computes its steps, and what the bits of a reply depend on."""
        layout, context_length = self._layout, self._parts.max_position
        steps = FEW_OPERATIONS
        if library is not None:
            try:
                compiled = compile_decoder(self._parts, library.result(), self._threads.large_pass)
                return CompiledRunner(compiled, cache_limit, context_length, self._threads), COMPILED, BY_TEXT
            except Exception as error:
                steps = explain_not_compiled(library, steps, error)
        check_required(self._options, steps)
        decoder = FusedDecoder(self._parts)
        if self._options.exact:
            with self._threads.applied():
                passes, exactness = probe_exactness(decoder, layout, self._ids, may_pack=True)
            return TorchRunner(decoder, layout, cache_limit, context_length, self._threads, passes), steps, exactness
        forward: Forward = decoder
        if layout.device.type == "cuda":
            # cuDNN builds a plan for every new pair of lengths: 20 ms each, and memory that is never freed
            torch.backends.cuda.enable_cudnn_sdp(False)
            forward, steps = self._probe(decoder).with_cuda_graphs(decoder, layout, steps, self._options)
        return TorchRunner(forward, layout, cache_limit, context_length, self._threads), steps, BY_BATCH

    def _probe(self, decoder: FusedDecoder) -> ForwardProbe:
        """Expects what the decoder itself gives for the whole text at once; CUDA graphs must give the same."""
        layout, ids = self._layout, self._ids
        slots = SlotAllocator(layout, PROBE_BYTES)
        whole = sequence_chunk(slots.allocate(LENGTH), 0, ids)
        expected = decoder(build_block_batch([whole], LENGTH, 0, layout.device, need_logits=True))
        slot = slots.allocate(LENGTH)
        by_token = (build_batch([sequence_chunk(slot, at, ids[at : at + 1])], layout.device) for at in range(LENGTH))
        rounding = max(max_difference(decoder(batch)[0], expected[at]) for at, batch in enumerate(by_token))
        return ForwardProbe(ids, expected, layout.dtype, rounding)
