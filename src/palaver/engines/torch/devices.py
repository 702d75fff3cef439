"""The device and the dtype of a model: the named ones, or the best there are."""

from __future__ import annotations

import torch

from palaver.errors import BadParameter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str | None) -> torch.device:
    """The named device, or the best there is."""
    if name is not None:
        return _named_device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadParameter("device", name, "there is no such device here; try cpu") from error
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """float32 on the CPU, where it is exact and no slower; else bfloat16, or float16 where that is missing."""
    if name is not None:
        if name not in DTYPES:
            raise BadParameter("dtype", name, f"must be one of {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16
