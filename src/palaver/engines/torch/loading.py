"""From files to a model on a device, with whatever the libraries would print kept quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as library_logging

from palaver.engines.torch.checkpoint import Checkpoint
from palaver.engines.torch.quantisation import is_unpacked, method, quantisation
from palaver.errors import BadParameter, BrokenModel

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


def load_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model, ready to run. A tensor that is missing or of another shape is an error, never a guess."""
    try:
        with quiet():
            model, report = _from_pretrained(checkpoint, device, dtype)
    except Exception as error:
        name = f"{checkpoint.name!r}{_form(checkpoint)}"
        raise BrokenModel(f"The model {name} couldn't be loaded: {_why(error)}") from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise BrokenModel(f"The weights of {checkpoint.name!r} lack {len(missing)} tensors, the first is {missing[0]}.")
    return model.eval().requires_grad_(False)


def _from_pretrained(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    settings = quantisation(checkpoint.config)
    unpacked = is_unpacked(checkpoint.config, device)
    moves = settings is None or unpacked
    options: dict[str, Any] = {}
    if unpacked and settings is not None:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        config.quantization_config = settings | {"dequantize": True}
        options["config"] = config
    elif settings is not None and device.type != "cpu":
        options["device_map"] = {"": str(device)}  # many of them can't be moved afterwards
    model, report = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **options,
    )
    if unpacked:
        for parameter in model.parameters():  # some come out in a type of their own
            parameter.data = parameter.data.to(dtype)
    return model.to(device) if moves else model, report


def _form(checkpoint: Checkpoint) -> str:
    form = method(checkpoint.config)
    return "" if form is None else f" (its weights are quantised, {form})"


def _why(error: Exception) -> str:
    """The first line of the cause: what the library raises last often says only that something went wrong."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it takes the Python package {error.name}, which isn't installed."
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of the libraries' own on stdout or stderr: what a user must know comes as an error of ours."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity(logging.CRITICAL)
    library_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()
