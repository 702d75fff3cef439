"""The torch engine: loads a model, picks its runner and starts its worker thread.

A plain decoder that its configuration identifies is loaded without the transformers library, and nothing is compared
with the library's logits: see `core/decoder_config.py` for what is trusted. All other models are loaded by
`library_engine.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from palaver.engines.base import BY_BATCH, BY_TEXT, COMPILED, EXACTNESS_LABELS, EngineInfo, Fingerprint
from palaver.engines.compiled.build import NO_COMPILER, Library, start_build
from palaver.engines.compiled.decoder import CompiledRunner
from palaver.engines.compiled.engine import compiled_fingerprint
from palaver.engines.core.checkpoint import Checkpoint, open_checkpoint
from palaver.engines.core.decoder_config import (
    FLOATS,
    QKV,
    DecoderConfig,
    decoder_info,
    layer_prefix,
    read_plain_config,
)
from palaver.engines.core.draft_model import RunnerDraftModel
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.core.media import MediaCache
from palaver.engines.core.options import EngineOptions, check_cache_bytes, check_drafts, divide_cache
from palaver.engines.core.quantization_config import Quantization, read_quantization
from palaver.engines.core.runner import SMALL_MODEL, Runner, UnsupportedModel
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.torch.batch import build_batch, build_block_batch, sequence_chunk
from palaver.engines.torch.device_sampler import sampler_version
from palaver.engines.torch.devices import (
    TensorLayout,
    TensorMemory,
    TorchThreads,
    cache_bytes,
    check_fit,
    fit,
    free_bytes,
    pick_device,
    pick_dtype,
)
from palaver.engines.torch.forward_probe import (
    CUDA_KERNELS,
    FEW_OPERATIONS,
    KERNELS_VERSION,
    LAYER_KERNELS_VERSION,
    LENGTH,
    LIBRARY_AND_KERNELS,
    PROBE_BYTES,
    ForwardProbe,
    check_required,
    explain_not_compiled,
    max_difference,
    probe_ids,
)
from palaver.engines.torch.model_runner import Forward, TorchRunner, pick_step_runner, probe_exactness
from palaver.engines.torch.plain_decoder import (
    DecoderLayer,
    FusedDecoder,
    Linear,
    LinearLayer,
    PlainDecoder,
    RMSNorm,
    RotaryEmbedding,
    StaticRotary,
    build_layer,
    compile_decoder,
    norm_heads,
    transpose_weights,
)
from palaver.engines.torch.quantized_weights import QuantizedLinear, StoredWeight, read_weight
from palaver.errors import BadParameter, BrokenModel, CantCompile, UnknownModel
from palaver.memory import give_back_unused
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
        media: MediaCache | None = None,
    ) -> None:
        """`info` lacks what follows from the runner. `small`: whether the model is a small one. `library`: the code of
        compiled steps; None where they are off."""
        hint = NO_COMPILER_HINT if info.steps.endswith(NO_COMPILER) else ""
        info = replace(info, reuse=runner.reuse, hint=hint)
        build = library.result() if library is not None and info.steps == COMPILED else None
        fingerprint = _fingerprint(info) if build is None else compiled_fingerprint(build)
        if build is not None and media is not None:  # torch encodes them
            encoders = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
            fingerprint = replace(fingerprint, build=f"{fingerprint.build}-{encoders}")
        info = replace(info, fingerprint=str(fingerprint))
        check_drafts(options, runner, info.steps)
        limits = _limits(options, torch.device(info.device), small)
        on_host = torch.device(info.device).type == "cpu"
        on_idle = runner.on_idle if isinstance(runner, TorchRunner) else None
        context = _thread_context(threads, on_host)
        super().__init__(info, vocabulary, runner, limits, context, on_failure, media, on_idle)


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
    runners = {
        FEW_OPERATIONS: "fused",
        CUDA_KERNELS: f"kernels-{KERNELS_VERSION}",
        LIBRARY_AND_KERNELS: f"layers-{LAYER_KERNELS_VERSION}",
    }
    runner = next((name for steps, name in runners.items() if info.steps.startswith(steps)), "library")
    unit = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    build, sampler = f"torch-{torch.__version__}-{unit}", f"sampler-{sampler_version(device)}"
    return Fingerprint(runner, build, device.type, info.dtype, EXACTNESS_LABELS[info.exactness], sampler)


def _limits(options: EngineOptions, device: torch.device, small: bool) -> SchedulerLimits:
    """By default a chunk of a prompt takes a small part of a second."""
    chunk = 1024 if device.type != "cpu" else 128 if small else 32
    limits = options.limits or SchedulerLimits(chunk_tokens=chunk)
    return limits if options.max_running is None else replace(limits, max_running=options.max_running)


def start_library_build(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions,
    quantization: Quantization | None = None,
) -> Future[Library] | None:
    """Starts to build or load the compiled code in a thread of its own. The future raises CantCompile with the reason
    where that fails. None where compiled steps are off, or by default on devices other than the CPU."""
    compiled = options.compiled if options.fused else False
    if compiled is False or (device.type != "cpu" and not compiled):
        return None
    if device.type != "cpu" or dtype != torch.float32:
        return _no_library("they are for float32 on the CPU")
    estimate = fit(checkpoint, device, dtype, True, quantization)
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
    options = options or EngineOptions()
    if not Path(model).expanduser().is_dir():
        raise UnknownModel(str(model), "there is no such folder.")
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    if adapter is None and quantize_bits is None and options.fused:
        with suppress(UnsupportedModel, BrokenModel):  # which the library's way explains
            return load_plain_model(model, vocabulary, torch_device, torch_dtype, options, on_failure)
    if options.draft_model is not None:
        raise _no_draft_model(options.draft_model)
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
    quantization = _plain_quantization(checkpoint)
    estimate = fit(checkpoint, torch_device, torch_dtype, compiles, quantization)
    if not estimate.fits and not compiled:
        estimate = fit(checkpoint, torch_device, torch_dtype, False, quantization)
    return str(estimate)


def _plain_quantization(checkpoint: Checkpoint) -> Quantization | None:
    """The quantisation of a plain decoder, if it is read without the library."""
    try:
        quantization = read_quantization(checkpoint.config)
        read_plain_config(checkpoint, quantization)
    except UnsupportedModel:
        return None
    return quantization


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
    quantization = read_quantization(checkpoint.config)
    config = read_plain_config(checkpoint, quantization)
    info = decoder_info(checkpoint, config, options.context, str(device), str(dtype).removeprefix("torch."))
    check_fit(checkpoint, device, dtype, bool(options.compiled), quantization)
    library = start_library_build(checkpoint, device, dtype, options, quantization)
    small = dtype.itemsize * sum(tensor.elements for tensor in checkpoint.tensors.values()) <= SMALL_MODEL
    threads = TorchThreads.choose(options.threads, small)
    with torch.inference_mode(), threads.applied():  # for a small model more threads only wait for each other
        parts = read_plain_decoder(checkpoint, config, device, dtype, info.context_length)
        picker = _RunnerPicker(parts, config.vocabulary_size, options, threads)
        draft_picker = None if options.draft_model is None else _open_draft_model(options, device, dtype, threads)
        check_cache_bytes(options, free_bytes(device), str(device))
        cache_limit = cache_bytes(device) if options.cache_bytes is None else options.cache_bytes
        draft_limit = 0
        if draft_picker is not None:
            cache_limit, draft_limit = divide_cache(cache_limit, picker.token_bytes, draft_picker.token_bytes)
        runner, steps, exactness = picker.pick(cache_limit, library)
        if draft_picker is not None:
            runner.draft_model = _draft_model(draft_picker, draft_limit, runner, options, config.vocabulary_size)
    info = replace(info, steps=steps, exactness=exactness)
    engine = TorchEngine(info, vocabulary, runner, options, threads, small, library, on_failure)
    del parts, picker, draft_picker  # compiled steps hold a copy of the weights: then these can be freed
    if not small:
        give_back_unused()
    return engine


def _open_draft_model(
    options: EngineOptions, device: torch.device, dtype: torch.dtype, threads: TorchThreads
) -> _RunnerPicker:
    """Raises UnsupportedModel unless it is a plain decoder."""
    assert options.draft_model is not None
    checkpoint = open_checkpoint(options.draft_model)
    config = read_plain_config(checkpoint, read_quantization(checkpoint.config))
    check_fit(checkpoint, device, dtype, False, read_quantization(checkpoint.config))
    parts = read_plain_decoder(checkpoint, config, device, dtype, config.max_position)
    own = replace(options, exact=False, drafts=False, search_tiles=False)  # a draft may have any bits
    return _RunnerPicker(parts, config.vocabulary_size, own, threads)


def _draft_model(
    picker: _RunnerPicker, cache_limit: int, runner: Runner, options: EngineOptions, shared_tokens: int
) -> RunnerDraftModel:
    """For a runner that verifies drafts. Raises BadParameter for others."""
    assert options.draft_model is not None
    if runner.verify_drafts is None:
        raise _no_draft_model(options.draft_model)
    drafter, _, _ = picker.pick(cache_limit, None)
    return RunnerDraftModel(drafter, picker.max_position, picker.vocabulary_size, shared_tokens)


def _no_draft_model(path: Path) -> BadParameter:
    why = "needs two plain decoders (Llama, Mistral, Qwen2, Qwen3), and --drafts or, with CUDA kernels, --exact"
    return BadParameter("--draft-model", str(path), why)


class _RunnerPicker:
    def __init__(
        self, parts: PlainDecoder, vocabulary_size: int, options: EngineOptions, threads: TorchThreads
    ) -> None:
        shape = (parts.num_kv_heads, parts.head_dim)
        memory = TensorMemory(parts.embedding.dtype, parts.embedding.device)
        self._parts = parts
        self._layout = TensorLayout(((shape, shape),) * len(parts.layers), memory)
        self._ids = probe_ids(vocabulary_size)
        self.vocabulary_size = vocabulary_size
        self._options = options
        self._threads = threads

    @property
    def token_bytes(self) -> int:
        """Of the cache of one token."""
        return self._layout.bytes_per_token

    @property
    def max_position(self) -> int:
        return self._parts.max_position

    def pick(self, cache_limit: int, library: Future[Library] | None) -> tuple[Runner, str, str]:
        """The runner, whose code computes its steps, and what the bits of a reply depend on."""
        layout, context_length = self._layout, self._parts.max_position
        steps = FEW_OPERATIONS
        if library is not None:
            try:
                compiled = compile_decoder(self._parts, library.result(), self._threads.large_pass)
                speculate = self._options.drafts is not False
                return (
                    CompiledRunner(compiled, cache_limit, context_length, self._threads, speculate),
                    COMPILED,
                    BY_TEXT,
                )
            except Exception as error:
                steps = explain_not_compiled(library, steps, error)
        check_required(self._options, steps)
        decoder = FusedDecoder(self._parts)
        if layout.device.type == "cuda":
            # cuDNN builds a plan for every new pair of lengths: 20 ms each, and memory that is never freed
            torch.backends.cuda.enable_cudnn_sdp(False)
        own = pick_step_runner(
            self._parts.step_model,
            decoder,
            layout,
            cache_limit,
            context_length,
            self._threads,
            self._options,
            self._ids,
        )
        if own is not None:
            return own[0], CUDA_KERNELS, own[1]
        self._widen_quantized()
        if self._options.exact:
            with self._threads.applied():
                passes, exactness = probe_exactness(decoder, layout, self._ids, may_pack=True)
            return TorchRunner(decoder, layout, cache_limit, context_length, self._threads, passes), steps, exactness
        forward: Forward = decoder
        if layout.device.type == "cuda":
            forward, steps = self._probe(decoder).with_cuda_graphs(decoder, layout, steps, self._options)
        choices: dict[str, Any] = {"run_ahead": self._options.run_ahead, "drafts": bool(self._options.drafts)}
        runner = TorchRunner(forward, layout, cache_limit, context_length, self._threads, **choices)
        return runner, steps, BY_BATCH

    def _widen_quantized(self) -> None:
        """Without the kernels, weights that become floats again in each pass are slow: they stay floats if they fit."""
        wide = (
            sum(one.packed.outputs * one.packed.inputs for one in self._parts.quantized) * self._layout.dtype.itemsize
        )
        free = free_bytes(self._layout.device)
        if wide and free is not None and wide < free // 2:
            self._parts.dequantize()

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


def read_plain_decoder(
    checkpoint: Checkpoint, config: DecoderConfig, device: torch.device, dtype: torch.dtype, max_position: int
) -> PlainDecoder:
    with _open_files(checkpoint) as files:
        return _DecoderReader(checkpoint, config, files, device, dtype).decoder(max_position)


@contextmanager
def _open_files(checkpoint: Checkpoint) -> Iterator[dict[Any, Any]]:
    with ExitStack() as stack:
        yield {path: stack.enter_context(safe_open(path, framework="pt")) for path in checkpoint.weights}


class _DecoderReader:
    """Reads the parts of a plain decoder from a checkpoint's files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        files: dict[Any, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._files = files
        self._device = device
        self._dtype = dtype
        self._quantization = read_quantization(checkpoint.config)

    def decoder(self, max_position: int) -> PlainDecoder:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight")
        static = StaticRotary(config.frequencies, self._device)
        rotary = RotaryEmbedding(static, embedding.new_empty(1), config.head_dim, max_position)
        return PlainDecoder(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            scale=config.scale,
            max_position=max_position,
            embedding=embedding,
            rotary=rotary,
            layers=[self._layer(layer_prefix(layer), rotary) for layer in range(config.num_layers)],
            norm=self._norm("model.norm"),
            lm_head=self._head(embedding),
        )

    def _layer(self, prefix: str, rotary: RotaryEmbedding) -> DecoderLayer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return build_layer(
            input_norm=self._norm(f"{prefix}input_layernorm"),
            qkv_proj=self._linear(attention, *QKV),
            qk_norm=self._qk_norm(attention) if self._config.qk_norm else None,
            o_proj=self._linear(attention, "o_proj"),
            post_attention_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up_proj=self._linear(mlp, "gate_proj", "up_proj"),
            down_proj=self._linear(mlp, "down_proj"),
            rotary=rotary,
        )

    def _head(self, embedding: Tensor) -> Linear:
        """As floats, also if it is stored quantised."""
        weight = embedding if self._config.tied else self._widen(self._weight("lm_head"))
        return Linear(transpose_weights(weight), None)

    def _linear(self, prefix: str, *names: str) -> LinearLayer:
        """Several layers side by side. Quantised weights become floats on the CPU, and where they can't be packed."""
        weights = [self._weight(f"{prefix}{name}") for name in names]
        biases = [self._bias(f"{prefix}{name}.bias", name in self._config.biases) for name in names]
        bias = torch.cat([bias for bias in biases if bias is not None]) if biases[0] is not None else None
        stored = [weight for weight in weights if isinstance(weight, StoredWeight)]
        if len(stored) == len(weights) and self._device.type != "cpu":
            together = StoredWeight.side_by_side(stored)
            packed = None if together is None else together.pack()
            if packed is not None:
                return QuantizedLinear(packed, bias, self._dtype)
        return Linear(transpose_weights(torch.cat([self._widen(weight) for weight in weights])), bias)

    def _weight(self, module: str) -> StoredWeight | Tensor:
        """[outputs, inputs]."""
        plain = self._checkpoint.tensors.get(f"{module}.weight")
        if plain is not None and plain.dtype in FLOATS:
            return self._tensor(f"{module}.weight")
        assert self._quantization is not None
        return read_weight(self._quantization, module, self._read)

    def _widen(self, weight: StoredWeight | Tensor) -> Tensor:
        return weight.dequantize(self._dtype) if isinstance(weight, StoredWeight) else weight

    def _bias(self, name: str, used: bool) -> Tensor | None:
        if used:
            return self._tensor(name)
        if name in self._checkpoint.tensors and bool(self._read(name).any()):  # some programs store zeros
            raise UnsupportedModel(f"its weights are not those of its configuration ({name})")
        return None

    def _norm(self, module: str) -> RMSNorm:
        return RMSNorm(self._tensor(f"{module}.weight"), self._config.epsilon)

    def _qk_norm(self, prefix: str) -> RMSNorm:
        query, key = (self._tensor(f"{prefix}{name}.weight") for name in ("q_norm", "k_norm"))
        return norm_heads(query, key, self._config.num_heads, self._config.num_kv_heads, self._config.epsilon)

    def _tensor(self, name: str) -> Tensor:
        return self._read(name).to(self._dtype)

    def _read(self, name: str) -> Tensor:
        """As it is stored, on the device. Raises KeyError if there is none."""
        tensor: Tensor = self._files[self._checkpoint.tensors[name].path].get_tensor(name).to(self._device)
        return tensor
