"""The torch engine: an own scheduler over the transformers library's model code."""

from palaver.engines.torch.engine import EngineStatistics, TorchEngine, describe_fit, load
from palaver.engines.torch.options import Options
from palaver.engines.torch.scheduler import Limits

__all__ = ["EngineStatistics", "Limits", "Options", "TorchEngine", "describe_fit", "load"]
