"""A LoRA adapter on top of a model: merged into its weights when it is loaded, so that nothing is slower for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from palaver.engines.torch.loading import quiet
from palaver.errors import BrokenModel, UnsafeWeights


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model as it was trained on. Raises where the adapter is none, or belongs to another model."""
    if not (folder / "adapter_model.safetensors").is_file():
        if (folder / "adapter_model.bin").is_file():
            raise UnsafeWeights(str(folder), "adapter_model.bin")
        raise BrokenModel(f"The folder {str(folder)!r} holds no adapter (adapter_model.safetensors).")
    try:
        from peft import PeftModel
    except ImportError:
        raise BrokenModel("An adapter takes the Python package peft, which isn't installed.") from None
    try:
        with quiet():
            adapted: Any = PeftModel.from_pretrained(model, str(folder), is_trainable=False, local_files_only=True)
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
        raise BrokenModel(f"The adapter in {str(folder)!r} does not fit the model: {why}") from error
    return merged.eval().requires_grad_(False)
