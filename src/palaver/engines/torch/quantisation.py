"""Checkpoints in a quantised form: which one it is, and what becomes of it on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

UNPACKED = {"fp8": 1, "mxfp8": 1, "mxfp4": 2}
"""Forms that become floats again where there is no accelerator for them, and how many numbers lie in a byte."""


def quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a model's configuration says of it; None where its weights are plain."""
    found = config.get("quantization_config")
    return dict(found) if isinstance(found, Mapping) else None


def method(config: Mapping[str, Any]) -> str | None:
    """The name of the form, as the transformers library knows it."""
    found = quantisation(config)
    return None if found is None else str(found.get("quant_method", "unknown"))


def is_unpacked(config: Mapping[str, Any], device: torch.device) -> bool:
    """Whether its weights will be floats again, which take more memory than their files."""
    return method(config) in UNPACKED and device.type != "cuda"
