"""Compiles the CUDA kernels for a GPU that is not there, and says how much of it they take.

    python -m tests.engines.compile_kernels 9.0 [few]

Runs in a process without TRITON_INTERPRET. Steps of models without memory (torch's device `meta`) launch the kernels.
A launch is not run: its source, the types of its arguments and its constants are recorded, and compiled later. Prints a
line of JSON for each. `few`: only those that need most of the device, of each kind one."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from palaver.engines.torch import kernel_functions, mxfp4, step_weights
from palaver.engines.torch.cuda_step import DecoderStep
from palaver.engines.torch.device_filters import WIDTH
from palaver.engines.torch.hybrid_kernels import GatedDeltaLayer, rms_norm
from palaver.engines.torch.kernel_sampler import KernelSampler
from palaver.engines.torch.plain_decoder import Linear, LinearLayer
from palaver.engines.torch.quantized_weights import Kind, PackedWeight, QuantizedLinear
from palaver.engines.torch.step_weights import (
    Attention,
    ExpertProjection,
    Experts,
    FeedForward,
    HeadShape,
    StepLayer,
    StepModel,
    TiledProjection,
)
from palaver.engines.torch.tile_shapes import DeviceLimits, fit_tile
from palaver.engines.torch.tile_timer import with_tiles
from palaver.engines.torch.weight_memory import FLOAT8_CAPABILITY

DEVICES = {
    # name, capability, bytes of shared memory that a program may take, processors: as the devices report them
    (8, 0): DeviceLimits("NVIDIA A100-SXM4-80GB", (8, 0), 166912, 108),
    (9, 0): DeviceLimits("NVIDIA H200", (9, 0), 232448, 132),
    (10, 0): DeviceLimits("NVIDIA B200", (10, 0), 232448, 148),
    (12, 0): DeviceLimits("NVIDIA GeForce RTX 5090", (12, 0), 101376, 170),
}
VOCABULARY = 151936
ROWS = 32
META = torch.device("meta")


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=META)


FULL_ATTENTION = Attention(0.1, 0)


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: HeadShape
    bias: bool = False
    sandwich: bool = False
    """Whether the results of a layer's parts are normed, too."""
    attention: Attention = FULL_ATTENTION
    activation: str = "silu"
    softcap: float = 0.0
    experts: int = 0
    top_k: int = 0
    narrow: bool = False
    quantized: tuple[Kind, int, int, bool] | None = None
    """The kind of the weights, the inputs of a block and of a group, and whether there are zero points."""


SMALL = Sizes(1024, 3072, HeadShape(16, 8, 128, True))
LARGE = Sizes(4096, 12288, HeadShape(32, 8, 128, True))
OSS = Sizes(
    2880,
    2880,
    HeadShape(64, 8, 64, False),
    bias=True,
    attention=Attention(0.1, 0, window=128, sinks=empty(64)),
    activation="clamped_swiglu",
    experts=32,
    top_k=4,
)
MODELS = {
    "8B": LARGE,
    "0.6B": SMALL,
    "Gemma": Sizes(
        2304,
        9216,
        HeadShape(8, 4, 256, False),
        sandwich=True,
        attention=Attention(0.1, 0, window=4096, softcap=50.0),
        activation="gelu_tanh",
        softcap=30.0,
    ),
    "gpt-oss": OSS,
    "gpt-oss in mxfp4": replace(OSS, narrow=True),
    "30B with experts": Sizes(2048, 768, HeadShape(32, 4, 128, True), experts=128, top_k=8),
    "8B in fp8": replace(LARGE, quantized=(Kind.FLOAT8, 128, 128, False)),
    "8B in int8": replace(LARGE, quantized=(Kind.INT8, 128, 4096, False)),
    "8B in int4": replace(LARGE, quantized=(Kind.INT4, 128, 128, True)),
}


def build_model(sizes: Sizes) -> StepModel:
    heads = sizes.heads

    def linear(outputs: int, inputs: int) -> LinearLayer:
        bias = empty(outputs) if sizes.bias else None
        if sizes.quantized is None:
            return Linear(empty(inputs, outputs), bias)
        kind, width, group, zeros = sizes.quantized
        groups = 1 if group > width else inputs // group
        words = empty(outputs // 64, inputs // width, 64, width // kind.per_word, dtype=torch.int32)
        zero_points = empty(groups, outputs, dtype=torch.uint8) if zeros else None
        packed = PackedWeight(kind, words, empty(groups, outputs, dtype=torch.float32), zero_points)
        return QuantizedLinear(packed, bias, torch.bfloat16)

    def expert(outputs: int, inputs: int, gated: bool) -> ExpertProjection:
        rows = outputs * (2 if gated else 1)
        bias = empty(sizes.experts, rows) if sizes.bias else None
        return ExpertProjection.of(empty(sizes.experts, rows, inputs), bias, gated, sizes.bias and gated)

    def encode(weight: Tensor, interleaved: bool) -> tuple[Tensor, Tensor] | None:
        experts, outputs, inputs = weight.shape
        blocks = experts, outputs // mxfp4.BLOCK, inputs // mxfp4.BLOCK
        codes, exponents = empty(*blocks, 64, 32, dtype=torch.uint8), empty(*blocks, 2, 64, dtype=torch.uint8)
        return (codes, exponents) if sizes.narrow else None

    step_weights._encode = encode  # which looks at the numbers

    def feed_forward() -> FeedForward | Experts:
        if not sizes.experts:
            gate_up = TiledProjection.of(linear(2 * sizes.intermediate, sizes.hidden), gated=True)
            return FeedForward(gate_up, TiledProjection.of(linear(sizes.hidden, sizes.intermediate)))
        router = TiledProjection.of(linear(-(-sizes.experts // 64) * 64, sizes.hidden), router=True)
        up, down = expert(sizes.intermediate, sizes.hidden, True), expert(sizes.hidden, sizes.intermediate, False)
        return Experts(router, sizes.experts, sizes.top_k, True, up, down)

    def layer() -> StepLayer:
        gain = empty(sizes.hidden)
        return StepLayer(
            input_gain=gain,
            qkv=TiledProjection.of(linear((heads.heads + 2 * heads.kv_heads) * heads.size, sizes.hidden)),
            query_gain=empty(heads.size),
            key_gain=empty(heads.size),
            attention=sizes.attention,
            output=TiledProjection.of(linear(sizes.hidden, heads.heads * heads.size)),
            output_gain=gain if sizes.sandwich else None,
            feed_forward_gain=gain,
            feed_forward=feed_forward(),
            result_gain=gain if sizes.sandwich else None,
        )

    table = empty(8192, heads.size // 2, dtype=torch.float32)
    return StepModel(
        heads=heads,
        embedding=empty(VOCABULARY, sizes.hidden),
        layers=[layer(), layer()],
        final_gain=empty(sizes.hidden),
        head=TiledProjection.of(Linear(empty(sizes.hidden, VOCABULARY), None)),
        vocabulary_size=VOCABULARY,
        epsilon=1e-6,
        qk_epsilon=1e-6,
        rotary=[(table, table)],
        activation=sizes.activation,
        logit_softcap=sizes.softcap,
    )


def run_model(sizes: Sizes, limits: DeviceLimits, few: bool) -> None:
    """All steps that have a graph. `few`: one of each kind."""
    model = with_tiles(build_model(sizes), lambda product, tile: fit_tile(tile, product, limits))
    step = DecoderStep(model, False, None, ROWS, pdl=limits.has_dependent_launch)
    for total in (1024,) if few else step.mixed_rows:
        step._compute(ROWS, total, False, False)
    for rows in (1, ROWS) if few else (1, 2, 8, 16, 24, ROWS):
        step._compute(rows, 0, False, False)
    step._compute(ROWS, 0, True, False)
    step.replace_tokens(step.lists.keys.new_empty(ROWS, WIDTH, dtype=torch.float64))


def run_sampler() -> None:
    sampler = KernelSampler(META)
    sampler.compile(empty(ROWS, VOCABULARY, dtype=torch.float32), VOCABULARY)


def run_hybrid() -> None:
    """In the sizes of Qwen3.5 4B."""
    key_heads, value_heads, size = 16, 32, 128
    channels = 2 * key_heads * size + value_heads * size
    with META:
        module = SimpleNamespace(
            layer_idx=0,
            num_k_heads=key_heads,
            num_v_heads=value_heads,
            head_k_dim=size,
            head_v_dim=size,
            activation="silu",
            conv1d=nn.Conv1d(channels, channels, 4, groups=channels, bias=False, dtype=torch.bfloat16),
            norm=SimpleNamespace(weight=empty(size, dtype=torch.float32), variance_epsilon=1e-6),
            in_proj_qkv=nn.Linear(2560, channels, dtype=torch.bfloat16),
            in_proj_z=nn.Linear(2560, value_heads * size, dtype=torch.bfloat16),
            in_proj_b=nn.Linear(2560, value_heads, dtype=torch.bfloat16),
            in_proj_a=nn.Linear(2560, value_heads, dtype=torch.bfloat16),
            out_proj=nn.Linear(value_heads * size, 2560, dtype=torch.bfloat16),
            A_log=empty(value_heads, dtype=torch.float32),
            dt_bias=empty(value_heads),
        )
    layer = GatedDeltaLayer(module)
    for rows, tokens in ((1, 512), (1, 1), (ROWS, 1)):
        states = SimpleNamespace(
            conv_states=[empty(rows, channels, 4)],
            recurrent_states=[empty(rows, value_heads, size, size, dtype=torch.float32)],
            has_previous_state=[True],
        )
        layer(empty(rows, tokens, 2560), SimpleNamespace(layers={0: states}))
    rms_norm(empty(ROWS, 2560), empty(2560), 1e-6, True)


class Driver:
    """Stands in for the driver of a GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Keeps what would be compiled: each kernel with the same constants and types of arguments once."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self._name = ""
        self.sources: dict[str, tuple[str, Any, Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        triton.runtime.driver.set_active(Driver(self._target))
        compile_source, launch = triton.compiler.compile, JITFunction.__getitem__
        triton.compiler.compile = self._record
        JITFunction.__getitem__ = lambda kernel, grid: (
            lambda *arguments, **options: kernel.run(*arguments, grid=grid, warmup=True, **options)
        )
        yield
        triton.compiler.compile, JITFunction.__getitem__ = compile_source, launch

    def run(self, name: str, passes: Callable[[], object]) -> None:
        self._name = name
        with torch.inference_mode():
            passes()

    def _record(self, source: Any, target: Any = None, options: Any = None, **_: Any) -> object:
        key = f"{source.name} {source.constants} {source.signature} {options}"
        self.sources.setdefault(key, (self._name, source, options))
        return SimpleNamespace()


def choose(sources: list[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Of each kernel, the one that needs most of each of a few kinds."""
    heaviest: dict[tuple[Any, ...], tuple[str, Any, Any]] = {}
    for entry in sorted(sources, key=lambda entry: need(*entry[1:])):
        constants = constants_of(entry[1])
        kind = (constants.get(name) for name in ("KIND", "GLU", "NARROW", "D"))
        heaviest[entry[1].name, constants.get("BM", 0) > ROWS, *kind] = entry
    yield from heaviest.values()


def constants_of(source: Any) -> dict[str, Any]:
    return {source.fn.arg_names[at[0]]: value for at, value in source.constants.items()}


def need(source: Any, options: Any) -> tuple[float, ...]:
    """Of sums in a thread first, then of shared memory."""
    sizes = constants_of(source)
    rows, outputs, depth, stages = (sizes.get(name, 1) for name in ("BM", "BN", "BK", "STAGES"))
    return rows * outputs / options["num_warps"], stages * depth * (rows + outputs)


def compile_all(limits: DeviceLimits, few: bool) -> None:
    target = GPUTarget("cuda", limits.capability[0] * 10 + limits.capability[1], 32)
    kernel_functions.shared_memory = lambda device: limits.shared_memory
    recorder = Recorder(target)
    with recorder.recording():
        for name, sizes in MODELS.items():
            if limits.capability >= FLOAT8_CAPABILITY or not sizes.quantized or sizes.quantized[0] is not Kind.FLOAT8:
                recorder.run(name, partial(run_model, sizes, limits, few))
        recorder.run("sampler", run_sampler)
        recorder.run("hybrid", run_hybrid)
    triton.knobs.nvidia.dump_ptxas_log = True
    sources = list(recorder.sources.values())
    for name, source, options in choose(sources) if few else sources:
        print(json.dumps(compile_one(name, source, target, options), default=str), flush=True)


def compile_one(model: str, source: Any, target: GPUTarget, options: Any) -> dict[str, Any]:
    """`spilled`: bytes of registers that a thread keeps in memory."""
    began, error, shared = time.perf_counter(), "", 0
    with contextlib.redirect_stdout(io.StringIO()) as log:
        try:
            shared = triton.compile(source, target=target, options=options).metadata.shared
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    return {
        "kernel": source.name,
        "model": model,
        "constants": constants_of(source),
        "warps": options["num_warps"],
        "error": error,
        "shared": shared,
        "registers": sum(map(int, re.findall(r"Used (\d+) registers", log.getvalue()))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", log.getvalue()))),
        "seconds": round(time.perf_counter() - began, 2),
    }


if __name__ == "__main__":
    major, minor = map(int, sys.argv[1].split("."))
    compile_all(DEVICES[major, minor], "few" in sys.argv)
