"""Quantised checkpoints: which method made them, and whether they become floats when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

VALUES_PER_BYTE = {"fp8": 1, "mxfp8": 1, "mxfp4": 2}
"""Quantisation methods whose weights are dequantised without CUDA, and how many values a byte holds."""


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantisation settings of a model's configuration; None where its weights are plain."""
    found = config.get("quantization_config")
    return dict(found) if isinstance(found, Mapping) else None


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The transformers library's name of the method."""
    found = quantization_config(config)
    return None if found is None else str(found.get("quant_method", "unknown"))


def is_dequantized(config: Mapping[str, Any], device: torch.device) -> bool:
    """Whether quantised weights become floats when loaded, which take more memory than their files."""
    return quantization_method(config) in VALUES_PER_BYTE and device.type != "cuda"
