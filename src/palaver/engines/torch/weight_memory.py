"""How much memory the weights of a quantised plain decoder take once they are loaded: packed, as the CUDA kernels read
them, or as floats where they can't be packed or the kernels don't run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.decoder_config import read_plain_config
from palaver.engines.core.quantization_config import BITS_PER_WORD, Quantization
from palaver.engines.torch.quantized_weights import block_words
from palaver.engines.torch.tile_shapes import HEAD_SIZES

FLOAT8 = "F8_E4M3"
FLOAT8_CAPABILITY = (8, 9)
"""Of the first devices whose kernels read 8-bit floats."""
SCALE_BYTES = 4
ZERO_BYTES = 1


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """The bytes of all weights."""

    floats: int
    """If all of them are floats."""
    packed: int
    """If those of linear layers are packed, as far as that is possible."""
    packable: int
    """Of those that can be packed, as floats."""
    buffer: int
    """Of the largest of them: the kernels unpack one layer at a time."""
    fits_kernels: bool
    """Whether the kernels know all sizes."""
    has_float8: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, quantization: Quantization, dtype: torch.dtype) -> WeightMemory:
        config = read_plain_config(checkpoint, quantization)
        shapes = config.tensor_shapes()
        floats = packed = dtype.itemsize * sum(map(math.prod, shapes.values()))
        packable, buffer, fits = 0, 0, config.head_dim in HEAD_SIZES
        for modules in config.joined_layers():
            sizes = [shapes[f"{module}.weight"] for module in modules]
            outputs, inputs = sum(size[0] for size in sizes), sizes[0][1]
            gated = len(modules) == 2
            fits &= (outputs // 2 if gated else outputs) % 64 == 0 and inputs % 64 == 0
            narrow = _packed_bytes(checkpoint, quantization, modules, outputs, inputs)
            if narrow is not None:
                wide = dtype.itemsize * outputs * inputs
                packed += narrow - wide
                packable += wide
                buffer = max(buffer, wide)
        float8 = any(tensor.dtype == FLOAT8 for tensor in checkpoint.tensors.values())
        return cls(floats, packed, packable, buffer, fits, float8)

    def held(self, device: torch.device, dtype: torch.dtype, free: int | None) -> int:
        """What a device with so much free memory holds after loading. Without the kernels, packed weights become floats
        if those take less than half of the memory that is free then."""
        if device.type == "cpu":
            return self.floats
        if self._runs_kernels(device, dtype):
            return self.packed + self.buffer
        widened = free is None or self.packable < (free - self.packed) // 2
        return self.floats if widened else self.packed

    def _runs_kernels(self, device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cuda" or dtype != torch.bfloat16 or find_spec("triton") is None:
            return False
        readable = not self.has_float8 or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
        return self.fits_kernels and readable


def _packed_bytes(
    checkpoint: Checkpoint, quantization: Quantization, modules: Sequence[str], outputs: int, inputs: int
) -> int | None:
    """Of layers side by side; None if they can't be packed, or if one of them is not quantised."""
    groups = quantization.groups(inputs)
    words = block_words(BITS_PER_WORD // quantization.bits, outputs, inputs, inputs // groups)
    quantized = all(quantization.is_quantized(module, checkpoint.tensors) for module in modules)
    if words is None or not quantized or quantization.has_offsets:
        return None
    per_scale = SCALE_BYTES + (0 if quantization.symmetric else ZERO_BYTES)
    return outputs * inputs * quantization.bits // 8 + groups * outputs * per_scale
