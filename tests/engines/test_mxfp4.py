"""Weights that were mxfp4 are encoded again without a loss; others are left alone."""

import torch

from palaver.engines.torch import mxfp4


def decode(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers of `mxfp4.encode`, [outputs, inputs]."""
    numbers = torch.tensor([*mxfp4.MAGNITUDES, *(-size for size in mxfp4.MAGNITUDES)])
    codes = torch.stack((blocks & 15, blocks >> 4), 2).long()  # [tiles, tiles, group, 64, 32]
    weights = torch.ldexp(numbers[codes], exponents.int()[..., None] - 127)
    tall, wide = blocks.shape[:2]
    return weights.permute(0, 3, 1, 2, 4).reshape(tall * mxfp4.BLOCK, wide * mxfp4.BLOCK)


def random_weights(outputs: int, inputs: int, most: int) -> torch.Tensor:
    """`most`: the greatest magnitude, as its number."""
    generator = torch.Generator().manual_seed(most)
    codes = torch.randint(most + 1, (outputs, inputs // 32, 32), generator=generator)
    signs = torch.randint(2, codes.shape, generator=generator) * 2 - 1
    exponents = torch.randint(-40, 20, (outputs, inputs // 32, 1), generator=generator)
    return torch.ldexp(torch.tensor(mxfp4.MAGNITUDES)[codes] * signs, exponents).view(outputs, inputs)


def test_nothing_is_lost_whatever_the_greatest_number_of_a_group() -> None:
    for most in range(len(mxfp4.MAGNITUDES)):
        weights = random_weights(128, 192, most).bfloat16()
        encoded = mxfp4.encode(weights)
        assert encoded is not None
        assert torch.equal(decode(*encoded), weights.float())


def test_outputs_that_take_turns_are_stored_one_kind_after_the_other() -> None:
    weights = random_weights(128, 64, 7)
    encoded = mxfp4.encode_experts(weights[None], interleaved=True)
    assert encoded is not None
    assert torch.equal(decode(encoded[0][0], encoded[1][0]), torch.cat((weights[0::2], weights[1::2])))


def test_other_weights_are_left_alone() -> None:
    weights = random_weights(64, 64, 7)
    weights[3, 5] *= 1.25
    assert mxfp4.encode(weights) is None
    assert mxfp4.encode(torch.randn(64, 64)) is None
