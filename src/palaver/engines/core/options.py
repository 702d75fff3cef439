"""The options of a local engine."""

from __future__ import annotations

from dataclasses import dataclass

from palaver.engines.core.scheduler import SchedulerLimits


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
    """Whether a plain decoder on the CPU is run by code that is compiled on this machine. None: if possible; True:
    raises CantCompile if it is not possible."""
    threads: int | None = None
    """CPU threads. None: by the size of the model, and all cores for a long prompt."""
    limits: SchedulerLimits | None = None
    """None: by the device and the size of the model."""
    max_running: int | None = None
    """Overrides `limits.max_running`."""
    context: int | None = None
    """A context length shorter than the model's own."""
    gpu_layers: int | None = None
    """Layers of a GGUF model that a GPU computes. None: llama.cpp decides."""
