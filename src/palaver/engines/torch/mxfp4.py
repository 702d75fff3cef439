"""mxfp4: numbers of four bits (sign, two bits of exponent, one of mantissa) in groups of 32 with a power of two each.

The transformers library turns such weights into bfloat16 unless optional packages are installed. That loses nothing, so
they can be turned back, for kernels that read them as they are stored: a quarter of the memory traffic."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
BLOCK = 64
"""Weights are stored in blocks of so many outputs and so many inputs, each contiguous: [outputs, inputs / 2]. The low
half of a byte belongs to the first group of the block's inputs, the high half to the second."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """[outputs, inputs] to blocks [outputs / 64, inputs / 64, 64, 32] of bytes and the exponents of their groups,
    [outputs / 64, inputs / 64, 2, 64], with a bias of 127. None where that would change a number."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    fraction, exponent = torch.frexp(groups.abs().amax(-1))
    exponent = torch.where(fraction <= 0.75, exponent - 3, exponent - 2)  # the greatest number is 6 = 0.75 * 2^3
    exponent = torch.where(fraction == 0, 0, exponent)
    scaled = torch.ldexp(groups, -exponent[..., None])
    magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
    codes = torch.bucketize(scaled.abs(), magnitudes)
    if int(codes.max()) >= len(MAGNITUDES) or not torch.equal(magnitudes[codes], scaled.abs()):
        return None
    if int(exponent.min()) < -126 or int(exponent.max()) > 113:  # beyond what the kernels multiply by
        return None
    codes = codes.to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    pairs = codes.view(outputs, inputs // BLOCK, 2, GROUP)
    packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
    blocks = packed.view(outputs // BLOCK, BLOCK, inputs // BLOCK, GROUP).transpose(1, 2)
    scales = (exponent + 127).to(torch.uint8).view(outputs // BLOCK, BLOCK, inputs // BLOCK, 2).permute(0, 2, 3, 1)
    return blocks.contiguous(), scales.contiguous()


def encode_experts(weight: Tensor, interleaved: bool) -> tuple[Tensor, Tensor] | None:
    """The same for [experts, outputs, inputs], with a dimension for the experts in front. `interleaved`: outputs take
    turns, and are stored one kind after the other."""
    blocks, scales = [], []
    for expert in weight:
        ordered = torch.cat((expert[0::2], expert[1::2])) if interleaved else expert
        encoded = encode(ordered)
        if encoded is None:
            return None
        blocks.append(encoded[0])
        scales.append(encoded[1])
    return torch.stack(blocks), torch.stack(scales)
