"""The torch engine: an own scheduler over the transformers library's model code."""

from palaver.engines.torch.engine import TorchEngine, load

__all__ = ["TorchEngine", "load"]
