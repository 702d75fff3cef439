"""Options for loading models, which engine runs a model, and how a process loads it.

This module imports little: a command can start the engine's process before it imports the rest."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palaver.engines.compiled.recognition import can_run
from palaver.engines.diffusion.config import find_diffusion
from palaver.engines.machine import has_accelerator, has_llamacpp
from palaver.engines.mlx.loader import is_apple_silicon, is_installed, is_mlx_folder
from palaver.errors import BadParameter, BrokenModel
from palaver.models.resolver import ResolvedModel, is_embedded

if TYPE_CHECKING:
    from palaver.engines.host.frames import EngineSpec
    from palaver.phases import Vocabulary

AUTO, TORCH, COMPILED, LLAMACPP = "auto", "torch", "compiled", "llamacpp"
MLX, DIFFUSION, VLLM = "mlx", "diffusion", "vllm"
"""The engines, as --engine names them. COMPILED is for GGUF files: for folders, compiled steps are a part of TORCH."""
LOCAL = (TORCH, COMPILED, LLAMACPP, MLX, DIFFUSION, VLLM)
REMOTE = "remote"
"""A server elsewhere, which --engine names by its address."""
RAY = "ray"
"""Replicas on a Ray cluster, which --engine names by its address."""
ADAPTABLE = (TORCH, LLAMACPP, MLX, DIFFUSION, VLLM)
"""Engines that take LoRA adapters."""
HOSTED = (LLAMACPP, VLLM, REMOTE, RAY)
"""Engines that always run in a process of their own."""
ELSEWHERE = (REMOTE, RAY)
"""Engines that need next to no memory here."""
REMOTE_ADDRESS = re.compile(r"(vllm|llamacpp)\+https?://\S+")
RAY_ADDRESS = re.compile(r"ray://[^\s/]+(/[\w.-]+)?")
"""The cluster, or `auto` for that of this node, and the application: by default the one with the model's name."""
STATES = Path("cache", "states")
"""The folder of `LoadOptions.states` in the data folder."""
ENGINE_FILES = {
    TORCH: "a folder with config.json and safetensors",
    COMPILED: "a GGUF file of a model that compiled steps know",
    LLAMACPP: "a GGUF file",
    MLX: "a folder for MLX",
    DIFFUSION: "a folder of a diffusion model",
    VLLM: "a folder with config.json and safetensors",
    REMOTE: "a model on another server",
    RAY: "a model on a Ray cluster",
}
"""What each engine runs."""
FITTING = {TORCH: (TORCH, MLX, DIFFUSION, VLLM), LLAMACPP: (LLAMACPP, COMPILED)}
"""The engines that --engine may name, by the one that files are made for; of others only that one."""


NOT_FOR_THIS_MACHINE = (
    "The weights of {name!r} are for MLX, which runs on Apple silicon. Here, use the model's original weights or a GGUF"
    " file of it. --engine mlx runs them on any CPU, but slowly."
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading models."""

    template: Path | None = None
    """A chat template to use instead of the model's."""
    raw: bool = False
    """Complete text as it is, without a chat template."""
    device: str | None = None
    dtype: str | None = None
    exact: bool = False
    compiled: bool | None = None
    """Compiled steps: None where they can be used, True required, False never (llama.cpp then runs a GGUF file)."""
    cache_bytes: int | None = None
    """The bound on the KV cache. None: a share of the free memory."""
    max_running: int | None = None
    """How many requests are computed at once. None: the engine decides."""
    engine: str = AUTO
    """Which engine runs the model, or the address of a server elsewhere; AUTO: by the kind of its files."""
    engine_python: Path | None = None
    """The Python of the environment that has vLLM. None: Palaver's own."""
    engine_key: str | None = None
    """The key of a server elsewhere."""
    native_sampling: bool = False
    """Whether vLLM's own sampler chooses the tokens."""
    gpu_layers: int | None = None
    """Layers of a GGUF model that a GPU computes. None: llama.cpp decides."""
    threads: int | None = None
    """Threads of the processor for each pass. None: by the size of the model, and all cores for a long prompt."""
    adapter: Path | None = None
    """A LoRA adapter: a folder, or a GGUF file for a GGUF model."""
    mmproj: Path | None = None
    """The projector of a GGUF model that sees or hears. None: the one beside the model's file, if there is one."""
    draft_model: Path | None = None
    """A smaller model with the same vocabulary, which drafts tokens: a folder or a GGUF file."""
    drafts: bool | None = None
    """Whether drafts of tokens are verified. None: where replies stay the same; True: also up to rounding."""
    states: Path | None = None
    """The folder in which llama.cpp's states of conversations outlive a restart. None: they don't."""
    approximate_cache: bool = False
    """Whether a bidirectional diffusion model computes the text before a block once a block. See `EngineOptions`."""

    @property
    def needs_torch(self) -> bool:
        """Whether an option is given that only torch has for folders. Only torch takes every kind of adapter."""
        return self.adapter is not None or self.compiled is not None or self.device not in (None, "gpu")

    def __post_init__(self) -> None:
        known = (AUTO, *LOCAL)
        if self.engine not in known and not is_address(self.engine):
            addresses = "vllm+https://host, llamacpp+http://host:8080 or ray://auto"
            names = f"must be {', '.join(known)} or an address such as {addresses}"
            raise BadParameter("--engine", self.engine, names)
        if self.engine_python is not None and not os.access(self.engine_python, os.X_OK):
            raise BadParameter("--engine-python", str(self.engine_python), "there is no such program")
        if self.threads is not None and self.threads < 1:
            raise BadParameter("--threads", self.threads, "must be at least 1")
        if self.template is not None and not self.template.is_file():
            raise BadParameter("--template", str(self.template), "there is no such file")
        if self.adapter is not None and not self.adapter.exists():
            raise BadParameter("--adapter", str(self.adapter), "there is no such file or folder")
        if self.mmproj is not None and not self.mmproj.is_file():
            raise BadParameter("--mmproj", str(self.mmproj), "there is no such file")
        if self.draft_model is not None and not self.draft_model.exists():
            raise BadParameter("--draft-model", str(self.draft_model), "there is no such file or folder")
        if self.draft_model is not None and self.drafts is False:
            raise BadParameter("--draft-model", str(self.draft_model), "--no-drafts switches its drafts off")


def is_address(engine: str) -> bool:
    """Whether the engine is elsewhere."""
    return bool(REMOTE_ADDRESS.fullmatch(engine) or RAY_ADDRESS.fullmatch(engine))


def pick_engine(model: ResolvedModel, loading: LoadOptions = LoadOptions()) -> str:  # noqa: B008 - frozen
    """By the kind of the files and of the machine. Raises BadParameter if one is named that can't run the files.

    On Apple silicon MLX runs folders: its own ones always, others where it is installed, unless an option needs torch.
    """
    engine = loading.engine
    if REMOTE_ADDRESS.fullmatch(engine):
        return REMOTE
    if RAY_ADDRESS.fullmatch(engine):
        return RAY
    kind = file_kind(model)
    if engine not in (AUTO, *FITTING.get(kind, (kind,))):
        raise BadParameter("--engine", engine, f"{ENGINE_FILES[kind]} is run by {kind}")
    if engine != AUTO:
        return engine
    if kind == MLX and not is_apple_silicon():
        raise BrokenModel(NOT_FOR_THIS_MACHINE.format(name=model.folder.name))
    if kind == TORCH and not loading.needs_torch and _prefers_mlx(model):
        return MLX
    if model.gguf is not None and _prefers_compiled(model, loading):
        return COMPILED
    return kind


def file_kind(model: ResolvedModel) -> str:
    """The engine that the files are made for, a key of ENGINE_FILES."""
    if model.gguf is not None:
        return LLAMACPP
    if find_diffusion(model.folder, model.diffusion) is not None:
        return DIFFUSION
    return MLX if is_mlx_folder(model.folder) else TORCH


def _prefers_compiled(model: ResolvedModel, loading: LoadOptions) -> bool:
    """Whether compiled steps run a GGUF file: they are required, or can do all that is asked for on this machine.

    They are tried on Linux. Where there is a GPU, llama.cpp may use it."""
    if loading.compiled is not None:
        return loading.compiled
    needs = (loading.adapter, model.adapter, loading.mmproj, model.mmproj, loading.gpu_layers)
    if any(option is not None for option in needs) or loading.device not in (None, "cpu"):
        return False
    elsewhere = sys.platform != "linux" or (loading.device is None and has_accelerator())
    assert model.gguf is not None
    return not (elsewhere and has_llamacpp()) and can_run(model.gguf)


def _prefers_mlx(model: ResolvedModel) -> bool:
    """The embedded models are run by the compiled decoder, which is quicker for their size."""
    needs_torch = model.adapter is not None or model.quantize_bits is not None or is_embedded(model.folder)
    return is_apple_silicon() and is_installed() and not needs_torch


def check_engine_options(model: ResolvedModel, loading: LoadOptions) -> str:
    """The engine that runs the model. Raises BadParameter for options that it doesn't have."""
    engine = pick_engine(model, loading)
    if engine == COMPILED and loading.device not in (None, "cpu"):
        raise BadParameter("--device", loading.device, "compiled steps run on the CPU")
    compiling = (COMPILED,) if model.gguf is not None else (TORCH, VLLM)
    for name, value, engines in (
        ("--gpu-layers", loading.gpu_layers, (LLAMACPP,)),
        ("--threads", loading.threads, (TORCH, COMPILED, LLAMACPP, DIFFUSION)),
        ("--mmproj", loading.mmproj, (LLAMACPP,)),
        ("--draft-model", loading.draft_model, (COMPILED, TORCH, LLAMACPP, MLX)),
        ("--drafts", loading.drafts or None, (TORCH, COMPILED, LLAMACPP, MLX)),
        ("--approximate-cache", loading.approximate_cache or None, (DIFFUSION,)),
        ("--compile", loading.compiled, compiling if loading.compiled else (TORCH, VLLM, LLAMACPP)),
        ("--dtype", loading.dtype, (TORCH, MLX, DIFFUSION, VLLM)),
        ("--adapter", loading.adapter or model.adapter, ADAPTABLE),
        ("--exact", loading.exact or None, (TORCH, COMPILED, LLAMACPP, MLX, DIFFUSION)),
        ("--native-sampling", loading.native_sampling or None, (VLLM,)),
        ("--kv-cache-memory", loading.cache_bytes, LOCAL),
        ("--device", loading.device, LOCAL),
        ("the bits of quantised weights", model.quantize_bits, (TORCH, DIFFUSION)),
    ):
        if value is not None and engine not in engines:
            own = file_kind(model)
            kind = own if own in engines else engines[0]
            chosen = kind in (own, COMPILED, VLLM)
            why = f"needs --engine {kind}" if chosen else f"is for {ENGINE_FILES[kind]}"
            raise BadParameter(name, str(value) if isinstance(value, Path) else value, why)
    return engine


def engine_python(loading: LoadOptions) -> Path | None:
    """The Python of another environment in which the engine's process runs."""
    return loading.engine_python or Path(sys.executable) if loading.engine == VLLM else None


def make_spec(model: ResolvedModel, vocabulary: Vocabulary, loading: LoadOptions) -> EngineSpec:
    """How a process loads the engine for a model. Raises BadParameter for options that it doesn't have."""
    from palaver.engines.host.frames import EngineSpec  # slow to import

    return EngineSpec(
        engine=check_engine_options(model, loading),
        model=model.gguf or model.folder,
        vocabulary=tuple(vocabulary),
        adapter=loading.adapter or model.adapter,
        mmproj=loading.mmproj or model.mmproj,
        draft_model=loading.draft_model,
        drafts=loading.drafts,
        device=loading.device,
        dtype=loading.dtype,
        quantize_bits=model.quantize_bits,
        exact=loading.exact,
        context=model.context_length,
        compiled=True if loading.engine == COMPILED else loading.compiled,
        cache_bytes=loading.cache_bytes,
        max_running=loading.max_running,
        gpu_layers=loading.gpu_layers,
        threads=loading.threads,
        states=loading.states,
        approximate_cache=loading.approximate_cache,
        diffusion=None if model.diffusion is None else dict(model.diffusion),
        python=engine_python(loading),
        native_sampling=loading.native_sampling,
        address=loading.engine if is_address(loading.engine) else None,
        key=loading.engine_key,
    )
