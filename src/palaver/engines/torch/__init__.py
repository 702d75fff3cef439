"""The torch engine: an own scheduler over the transformers library's model code."""

from palaver.engines.core.engine import EngineStatistics
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.torch.engine import TorchEngine, describe_fit, load

__all__ = ["EngineOptions", "EngineStatistics", "SchedulerLimits", "TorchEngine", "describe_fit", "load"]
