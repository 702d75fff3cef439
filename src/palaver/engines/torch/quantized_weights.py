"""Quantised weights: 8-bit floats, 8-bit integers and 4-bit integers, with scales.

The CUDA kernels read them packed, other code as floats. All formats of `core/quantization_config.py` become one of the
three kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from palaver.engines.core.quantization_config import BITS_PER_WORD, Quantization
from palaver.engines.core.runner import UnsupportedModel

BLOCK_OUTPUTS = 64
WORDS = (32, 16)
"""The words of an output in a block of packed weights: the most that the sizes allow."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ stores each of eight neighbouring outputs in an integer."""


class Kind(StrEnum):
    """What a number of a few bits stands for."""

    FLOAT8 = "float8"
    """The bits of a float: four of the exponent, three of the mantissa."""
    INT8 = "int8"
    """Itself, less 128."""
    INT4 = "int4"
    """Itself, less a zero point."""

    @property
    def bits(self) -> int:
        return 4 if self is Kind.INT4 else 8

    @property
    def per_word(self) -> int:
        return BITS_PER_WORD // self.bits


def block_words(per_word: int, outputs: int, inputs: int, group: int) -> int | None:
    """The words of an output in a block of packed weights; None if the sizes don't fit. `group`: how many inputs share
    a scale."""
    for words in WORDS if outputs % BLOCK_OUTPUTS == 0 else ():
        width = words * per_word
        fits = group in (inputs, width) or width % group == 0 or group % width == 0
        if inputs % width == 0 and group % words == 0 and fits:
            return words
    return None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The weights of a linear layer: numbers times scales."""

    kind: Kind
    numbers: Tensor
    """A byte each, [outputs, inputs]."""
    scales: Tensor
    """float32, [groups of inputs, outputs]."""
    zeros: Tensor | None = None
    """Zero points of `INT4`: bytes, of the shape of the scales; None: 8."""
    offsets: Tensor | None = None
    """What is added to the products of numbers and scales: float32, of the shape of the scales. The kernels don't know
    such weights."""

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.numbers.shape[1] // self.scales.shape[0]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]."""
        grouped = self._values().view(len(self.numbers), -1, self.group) * self.scales.t()[..., None]
        if self.offsets is not None:
            grouped = grouped + self.offsets.t()[..., None]
        return grouped.view(self.numbers.shape).to(dtype)

    def _values(self) -> Tensor:
        if self.kind is Kind.FLOAT8:
            return self.numbers.view(torch.float8_e4m3fn).float()
        if self.kind is Kind.INT8:
            return self.numbers.float() - 128
        zeros = 8 if self.zeros is None else self.zeros.t().float().repeat_interleave(self.group, 1)
        return self.numbers.float() - zeros

    def pack(self) -> PackedWeight | None:
        """None if the sizes don't fit, or if there are offsets."""
        outputs, inputs = self.numbers.shape
        per_word = self.kind.per_word
        words = block_words(per_word, outputs, inputs, self.group)
        if words is None or self.offsets is not None:
            return None
        blocks = self.numbers.view(outputs // BLOCK_OUTPUTS, BLOCK_OUTPUTS, -1, per_word, words)
        packed = torch.zeros_like(blocks[..., 0, :], dtype=torch.int32)
        for place in range(per_word):
            packed |= blocks[..., place, :].int() << place * self.kind.bits
        return PackedWeight(self.kind, packed.transpose(1, 2).contiguous(), self.scales, self.zeros)

    @classmethod
    def side_by_side(cls, weights: Sequence[StoredWeight]) -> StoredWeight | None:
        """The weights of several layers with the same inputs; None if they can't be one tensor."""
        first = weights[0]
        same = all(w.kind is first.kind and len(w.scales) == len(first.scales) and w.offsets is None for w in weights)
        if not same or len({w.zeros is None for w in weights}) > 1:
            return None
        zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights if w.zeros is not None], 1)
        numbers, scales = torch.cat([w.numbers for w in weights]), torch.cat([w.scales for w in weights], 1)
        return cls(first.kind, numbers, scales, zeros)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The same as the CUDA kernels read it: in blocks of 64 outputs, each contiguous."""

    kind: Kind
    words: Tensor
    """Integers of 32 bits, [blocks of outputs, blocks of inputs, 64, words of an output]. The lowest bits of a block's
    words are its first inputs, the next bits the inputs behind those, and so on."""
    scales: Tensor
    zeros: Tensor | None

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]

    @property
    def inputs(self) -> int:
        return self.words.shape[1] * self.width

    @property
    def width(self) -> int:
        """The inputs of a block."""
        return self.words.shape[3] * self.kind.per_word

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.inputs // self.scales.shape[0]

    @property
    def period(self) -> int:
        """After how many inputs the kernels multiply their sum by a scale; 0: after all."""
        return 0 if self.group == self.inputs else min(self.group, self.width)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]."""
        bits = self.kind.bits
        places = [self.words >> place * bits & (1 << bits) - 1 for place in range(self.kind.per_word)]
        numbers = torch.stack(places, 3).to(torch.uint8).transpose(1, 2).reshape(self.outputs, self.inputs)
        return StoredWeight(self.kind, numbers, self.scales, self.zeros).dequantize(dtype)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """As `Linear`, with weights that become floats for each product."""

    packed: PackedWeight
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """[in, out], of floats."""
        return self.packed.dequantize(self.dtype).t()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        out = torch.addmm(residual, x, self.weight)
        return out if self.bias is None else out.add_(self.bias)


Read = Callable[[str], Tensor]
"""Reads a tensor of the checkpoint; raises KeyError if there is none of this name."""


def read_weight(quantization: Quantization, module: str, read: Read) -> StoredWeight:
    """The weights of a quantised layer."""
    if quantization.method == "torchao":
        return _read_torchao(quantization, module, read)
    if not quantization.packed:
        return _read_8_bits(quantization, module, read)
    if quantization.method == "compressed-tensors":
        return _read_packed(quantization, module, read)
    return _read_columns(quantization, module, read)


def _read_8_bits(quantization: Quantization, module: str, read: Read) -> StoredWeight:
    name = "weight_scale_inv" if quantization.method == "fp8" else "weight_scale"
    return _with_scales(read(f"{module}.weight"), read(f"{module}.{name}"), quantization.block)


def _with_scales(stored: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> StoredWeight:
    """Weights of 8 bits. `scales`: [outputs or 1, groups], of blocks, or fewer dimensions."""
    scales = scales.float()
    outputs, inputs = stored.shape
    if block is not None:
        rows, columns = block
        if inputs % columns:
            raise UnsupportedModel("it has blocks of weights that are cut")
        scales = scales.repeat_interleave(rows, 0)[:outputs]
    elif scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    scales = scales.expand(outputs, -1).t().contiguous()
    if stored.dtype == torch.float8_e4m3fn:
        return StoredWeight(Kind.FLOAT8, stored.view(torch.uint8), scales)
    if stored.dtype != torch.int8:
        raise UnsupportedModel("it has quantised weights of another type")
    return StoredWeight(Kind.INT8, stored.view(torch.uint8) ^ 128, scales)


def _read_torchao(quantization: Quantization, module: str, read: Read) -> StoredWeight:
    """Zero points are whole numbers with 8 bits, and all 0; with 4 bits they are floats, which are added."""
    stored, scales = read(f"{module}._weight_qdata"), read(f"{module}._weight_scale")
    zeros: Tensor | None = None
    with suppress(KeyError):
        zeros = read(f"{module}._weight_zero_point")
    if zeros is not None and not bool(zeros.any()):
        zeros = None
    if quantization.bits == 8:
        if zeros is not None:
            raise UnsupportedModel("it has zero points of 8 bits")
        return _with_scales(stored, scales)
    if stored.dtype not in (torch.int8, torch.uint8):
        raise UnsupportedModel("it has quantised weights of another type")
    pairs = stored.view(torch.uint8)
    numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1) ^ 8  # signed numbers, the first in the low half
    offsets = None if zeros is None else zeros.float().contiguous()
    return StoredWeight(Kind.INT4, numbers, scales.float().contiguous(), offsets=offsets)


def _read_packed(quantization: Quantization, module: str, read: Read) -> StoredWeight:
    numbers = _unpack(read(f"{module}.weight_packed"), quantization.bits)
    if read(f"{module}.weight_shape").tolist() != list(numbers.shape):
        raise UnsupportedModel("it has weights of another shape than it says")
    scales = read(f"{module}.weight_scale").float().t().contiguous()
    zeros = None
    if not quantization.symmetric:
        zeros = _unpack(read(f"{module}.weight_zero_point").t(), 4).contiguous()  # packed along the outputs
    return StoredWeight(Kind.INT4 if quantization.bits == 4 else Kind.INT8, numbers, scales, zeros)


def _read_columns(quantization: Quantization, module: str, read: Read) -> StoredWeight:
    """Of formats that store a layer by columns."""
    words, zero_words, scales = (read(f"{module}.{name}") for name in ("qweight", "qzeros", "scales"))
    if quantization.method == "awq":
        numbers, zeros = _unpack(words, 4, AWQ_ORDER).t().contiguous(), _unpack(zero_words, 4, AWQ_ORDER)
        return StoredWeight(Kind.INT4, numbers, scales.float(), zeros)
    numbers, zeros = _unpack(words.t(), 4), _unpack(zero_words, 4) + quantization.zero_offset
    with suppress(KeyError):
        groups = torch.arange(numbers.shape[1]) // (numbers.shape[1] // len(scales))
        if not torch.equal(read(f"{module}.g_idx").cpu().long(), groups):
            raise UnsupportedModel("it has weights in another order")
    return StoredWeight(Kind.INT4, numbers, scales.float(), zeros)


def _unpack(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The numbers in integers of 32 bits, [rows, columns] to bytes [rows, columns * numbers of an integer]."""
    count = BITS_PER_WORD // bits
    places = torch.tensor(range(count) if order is None else order, dtype=torch.int32, device=words.device)
    numbers = (words[..., None] >> (places * bits)) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(1)
