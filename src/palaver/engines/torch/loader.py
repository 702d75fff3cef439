"""Loads a checkpoint with the transformers library: quantisation, LoRA adapters, the defaults in the model's files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging as library_logging

import palaver.engines.core.checkpoint as core_checkpoint
from palaver.engines.core import decoder_config
from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.checkpoint import has_processor as has_processor
from palaver.engines.core.quantization_config import describe_quantization
from palaver.engines.torch.devices import is_dequantized, quantization_config
from palaver.errors import BrokenModel, UnsafeCode, UnsafeWeights
from palaver.sampling import Sampling

_SAMPLING_SETTINGS = (*decoder_config.GENERATION_PARAMETERS, "do_sample")
UNBOUNDED_CONTEXT = 1_000_000


def load_model(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize_bits: int | None = None
) -> PreTrainedModel:
    """The model in evaluation mode. Raises BrokenModel where a tensor is missing or has another shape. `quantize_bits`
    quantises plain weights with bitsandbytes."""
    try:
        with quiet():
            model, report = _from_pretrained(checkpoint, device, dtype, quantize_bits)
    except Exception as error:
        name = f"{checkpoint.name!r}{_describe_quantization(checkpoint)}"
        raise BrokenModel(f"The model {name} couldn't be loaded: {_cause(error)}") from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise BrokenModel(f"The weights of {checkpoint.name!r} lack {len(missing)} tensors, such as {missing[0]}.")
    return model.eval().requires_grad_(False)


def _from_pretrained(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize_bits: int | None
) -> tuple[Any, dict[str, Any]]:
    settings = quantization_config(checkpoint.config)
    dequantized = is_dequantized(checkpoint.config, device)
    quantizes = settings is None and quantize_bits is not None
    movable = (settings is None or dequantized) and not quantizes
    options: dict[str, Any] = {}
    if dequantized and settings is not None:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        config.quantization_config = settings | {"dequantize": True}
        options["config"] = config
    if quantizes:
        options["quantization_config"] = _bitsandbytes_config(quantize_bits == 4, dtype)
    if not movable and device.type != "cpu":
        options["device_map"] = {"": str(device)}  # most quantised models can't be moved afterwards
    model, report = _model_class(checkpoint.folder).from_pretrained(
        checkpoint.folder,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **options,
    )
    if dequantized:
        for parameter in model.parameters():  # some have a dtype of their own
            parameter.data = parameter.data.to(dtype)
    return model.to(device) if movable else model, report


def _model_class(folder: Path) -> Any:
    """The class that also takes media where the model has a processor for them."""
    if not has_processor(folder):
        return AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    names = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    thinker = getattr(config, "thinker_config", None)  # of a model that also speaks: the part that writes text
    kind = config.model_type if thinker is None else thinker.model_type
    found = getattr(transformers, names[kind], None) if kind in names else None
    return AutoModelForCausalLM if found is None else found


def _bitsandbytes_config(four_bits: bool, dtype: torch.dtype) -> BitsAndBytesConfig:
    """The settings that axolotl trains with: 8 bits, or 4 bits (nf4) with double quantisation."""
    if not four_bits:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _describe_quantization(checkpoint: Checkpoint) -> str:
    settings = quantization_config(checkpoint.config)
    return "" if settings is None else f" (its weights are quantised, {describe_quantization(settings)})"


def _cause(error: Exception) -> str:
    """The first line of the first cause: the library's last error often says only that something went wrong."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it takes the Python package {error.name}, which isn't installed."
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the libraries' warnings, logs and progress bars: users see our own errors instead."""
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


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with a LoRA adapter merged into its weights. Raises where the adapter is missing or doesn't fit."""
    if not (folder / "adapter_model.safetensors").is_file():
        if (folder / "adapter_model.bin").is_file():
            raise UnsafeWeights(str(folder), "adapter_model.bin")
        raise BrokenModel(f"The folder {str(folder)!r} contains no adapter (adapter_model.safetensors).")
    try:
        from peft import PeftModel
    except ImportError:
        raise BrokenModel("Adapters need the Python package peft, which is not installed.") from None
    try:
        with quiet():
            adapted: Any = PeftModel.from_pretrained(model, str(folder), is_trainable=False, local_files_only=True)
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:
        raise BrokenModel(f"The adapter in {str(folder)!r} does not fit the model: {_first_line(error)}") from error
    return merged.eval().requires_grad_(False)


def sampling_defaults(config: GenerationConfig | None) -> Sampling:
    """The model's own sampling defaults; invalid values are ignored."""
    if config is None:
        return Sampling()
    return decoder_config.sampling_defaults({name: getattr(config, name, None) for name in _SAMPLING_SETTINGS})


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end-of-sequence ids of all of the model's configurations."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def context_length(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return UNBOUNDED_CONTEXT


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a model's folder. Reads headers only. Raises a ModelError if the files cannot be loaded."""
    return core_checkpoint.open_checkpoint(model, _check_architecture)


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if config.get("auto_map"):
        raise UnsafeCode(str(folder))
    raise BrokenModel(
        f"The configuration of {str(folder)!r} names the architecture {kind!r}, "
        "which this version of the transformers library doesn't know: a newer one may."
    )
