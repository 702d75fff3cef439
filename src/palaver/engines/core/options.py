"""The options of a local engine, whether a model fits into memory, and how much the KV cache may take beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palaver.engines.core.runner import Runner
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.errors import BadParameter, DoesNotFit
from palaver.memory import available_bytes


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of a local engine. The defaults suit most models and machines."""

    cache_bytes: int | None = None
    """The limit of the KV cache. None: a share of the free memory."""
    exact: bool = False
    """Whether the bits of a reply may depend on its text alone, which is slower. See `EngineInfo.exactness`."""
    fused: bool = True
    """Whether a plain decoder is run by our own code, if that gives the model's own logits."""
    compiled: bool | None = None
    """Whether a model on the CPU is run by code that is compiled on this machine. None: if possible; True: raises
    CantCompile if it is not possible."""
    threads: int | None = None
    """CPU threads. None: by the size of the model, and all cores for a long prompt."""
    limits: SchedulerLimits | None = None
    """None: by the device and the size of the model."""
    max_running: int | None = None
    """Overrides `limits.max_running`."""
    context: int | None = None
    """A context length shorter than the model's own."""
    run_ahead: bool | None = None
    """Whether the next pass starts before the host has read the tokens of the last one. None: on CUDA."""
    drafts: bool | None = None
    """Whether drafts are verified. None: where that gives the same bits; True: also where it gives the same up to
    rounding."""
    draft_model: Path | None = None
    """The folder or GGUF file of a smaller model with the same vocabulary, whose drafts are verified, too."""
    search_tiles: bool = False
    """Whether an idle engine with CUDA kernels searches their quickest tiles on this device, for the next start."""
    gpu_layers: int | None = None
    """Layers of a GGUF model that a GPU computes. None: llama.cpp decides."""
    states: Path | None = None
    """The folder in which the states of conversations with a GGUF model outlive a restart. None: they don't."""
    approximate_cache: bool = False
    """Whether a bidirectional diffusion model computes the text before a block once a block instead of at every step,
    which is faster and changes replies."""


GIB = 1 << 30
MAX_CPU_CACHE_BYTES = 2 * GIB
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""The share of the free memory, after loading the model, that the cache may take, by device type."""
RUNTIME_FACTOR = 1.05
"""The memory of a running model over that of its weights."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits, with figures."""

    weights_bytes: int
    needed_bytes: int
    free_bytes: int | None
    """None if it is not known."""
    device: str

    @classmethod
    def of(cls, weights_bytes: int, free_bytes: int | None, device: str) -> Fit:
        return cls(weights_bytes, int(weights_bytes * RUNTIME_FACTOR), free_bytes, device)

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes

    def check(self, name: str) -> None:
        """Raises DoesNotFit with the name of the model."""
        if not self.fits and self.free_bytes is not None:
            raise DoesNotFit(name, self.needed_bytes, self.free_bytes, self.device)

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else f"{self.free_bytes / 1e9:.2f} GB"
        return f"needs about {self.needed_bytes / 1e9:.2f} GB on {self.device}, free: {free}"


def default_cache_bytes(device_type: str, free: int | None) -> int:
    """The default bound on the KV cache of a loaded model: a share of the free memory, on the CPU at most 2 GiB."""
    if free is None:
        return GIB
    share = int(free * CACHE_SHARE.get(device_type, 0.5))
    return share if device_type == "cuda" else min(MAX_CPU_CACHE_BYTES, share)


def host_cache_bytes(options: EngineOptions) -> int:
    """The bound on a KV cache in the host's memory."""
    free = available_bytes()
    check_cache_bytes(options, free, "cpu")
    return default_cache_bytes("cpu", free) if options.cache_bytes is None else options.cache_bytes


def divide_cache(cache_bytes: int, token_bytes: int, draft_token_bytes: int) -> tuple[int, int]:
    """The bounds on the KV caches of a model and of its draft model, which have as many tokens."""
    draft_bytes = cache_bytes * draft_token_bytes // (token_bytes + draft_token_bytes)
    return cache_bytes - draft_bytes, draft_bytes


def check_drafts(options: EngineOptions, runner: Runner, steps: str) -> None:
    """Raises BadParameter where drafts are asked for and can't be verified. `steps`: as of `EngineInfo`."""
    if options.drafts and runner.verify_drafts is None:
        exact = "in the exact mode" if options.exact else f"of this model by {steps}"
        raise BadParameter("--drafts", "on", f"the tokens {exact} can't be verified several at a time")


def check_cache_bytes(options: EngineOptions, free: int | None, device: str) -> None:
    """Raises BadParameter where the cache may grow beyond the memory that is free after loading the model."""
    if options.cache_bytes is not None and free is not None and options.cache_bytes > free:
        size = f"{options.cache_bytes / 1e9:.1f} GB"
        raise BadParameter("--kv-cache-memory", size, f"{free / 1e9:.1f} GB are free on {device} beside the model")
