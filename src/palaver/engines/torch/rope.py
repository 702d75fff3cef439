"""Rotary embeddings whose frequencies depend on the length of a text.

longrope (Phi-3 and its successors for 128k tokens) has two sets of frequencies: one for texts up to the length the
model was first trained for, one for longer texts. The transformers library picks a set for a whole pass by its greatest
position. Here the length of each sequence decides, and sequences of different sets never share a pass.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPE = "longrope"


class LongRope:
    """The two sets of rotary frequencies of a model; one of them is active."""

    def __init__(self, modules: list[Any], original_length: int) -> None:
        self.original_length = original_length
        self._modules = modules
        self._short = [module.original_inv_freq for module in modules]
        self._long = [_long_frequencies(module, original_length) for module in modules]

    def attach(self) -> None:
        """Stops the library from changing the frequencies."""
        for module in self._modules:
            module.rope_type = "default"

    def detach(self) -> None:
        for module in self._modules:
            module.rope_type = ROPE_TYPE

    def use(self, long: bool) -> None:
        for module, frequencies in zip(self._modules, self._long if long else self._short, strict=True):
            module.inv_freq = frequencies


def find_longrope(model: PreTrainedModel) -> LongRope | None:
    """None where the model has no longrope embeddings, or several with different original lengths."""
    modules = [module for module in model.modules() if getattr(module, "rope_type", None) == ROPE_TYPE]
    lengths = {module.config.rope_parameters.get("original_max_position_embeddings") for module in modules}
    return LongRope(modules, lengths.pop()) if len(lengths) == 1 else None


def _long_frequencies(module: nn.Module, original_length: int) -> Any:
    frequencies, _ = ROPE_INIT_FUNCTIONS[ROPE_TYPE](
        module.config, module.original_inv_freq.device, seq_len=original_length + 1
    )
    return frequencies
