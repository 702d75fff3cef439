"""How an engine is run."""

from __future__ import annotations

from dataclasses import dataclass

from palaver.engines.core.scheduler import SchedulerLimits


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything here has a sensible default."""

    cache_bytes: int | None = None
    """The bound on the KV cache. None: a share of the free memory."""
    exact: bool = False
    """Whether a reply's bits may depend on nothing but its text: slower. `EngineInfo.exactness` says what holds."""
    fused: bool = True
    """Whether a plain decoder is run by code of ours, where that gives the model's own logits."""
    compiled: bool | None = None
    """Whether a plain decoder on the CPU is run by code that is compiled here. None: where it can be; True: CantCompile
    is raised where it can't."""
    threads: int | None = None
    """CPU threads. None: by the size of the model, and all cores for a long prompt."""
    limits: SchedulerLimits | None = None
    """None: by device and the size of the model."""
    max_running: int | None = None
    """How many requests are computed at once, in place of what `limits` says."""
    context: int | None = None
    """A shorter context than the model's own."""
