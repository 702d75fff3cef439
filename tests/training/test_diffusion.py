"""Sprout Diffusion's training: what a noisy block sees is what it will see when a reply is generated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from training.diffusion import network as diffusion
from training.diffusion.generation import denoise
from training.diffusion.network import END_ID, MASK_ID, NOISY, Batcher, DiffusionNetwork, Inputs, shape_of
from training.network import TINY, rotations
from training.shards import LEARNED, STARTS, TOKEN

LENGTH = 512


def random_network(seed: int = 0) -> DiffusionNetwork:
    """Weights large enough that what is seen decides the tokens."""
    torch.manual_seed(seed)
    network = DiffusionNetwork(shape_of(TINY))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)
    return network.eval()


def packed_rows() -> Tensor:
    """Two rows of conversations: prompt and reply lengths that do and do not fill blocks, and padding at the end."""
    random = np.random.default_rng(1)
    rows = []
    for lengths in (((40, 100), (17, 32), (60, 33)), ((5, 250), (100, 64))):
        row = np.concatenate(
            [
                np.concatenate([random.integers(9, 4000, prompt), random.integers(9, 4000, reply) | int(LEARNED)])
                | np.eye(1, prompt + reply, dtype=np.int64)[0] * int(STARTS)
                for prompt, reply in lengths
            ]
        )
        padding = np.zeros(LENGTH - len(row), np.int64)
        padding[:1] = int(STARTS)
        rows.append(np.concatenate([row, padding]))
    return torch.from_numpy(np.stack(rows).astype(np.int32))


def inputs(attention: str = "dense", blocks: int = 8, seed: int = 5) -> Inputs:
    torch.manual_seed(seed)
    return Batcher.of(shape_of(TINY), LENGTH, blocks, attention, torch.device("cpu")).inputs(packed_rows())


def test_blocks_are_of_replies_and_filled_with_end_tokens() -> None:
    packed = packed_rows()
    learned = (packed & int(LEARNED)) != 0
    for seed in range(20):
        torch.manual_seed(seed)
        starts, drawn = diffusion.draw_blocks(learned, 8)
        assert drawn.all()
        assert learned.gather(1, starts).all()
        assert (starts.diff(dim=1) >= 0).all()
    documents = ((packed & int(STARTS)) != 0).int().cumsum(1)
    start = torch.tensor([[40 + 96], [5 + 224]])
    places = (start[:, :, None] + torch.arange(NOISY)).flatten(1)
    target, inside = diffusion.block_tokens((packed & int(TOKEN)).long(), documents, start, places)
    assert inside.sum(1).tolist() == [4, 26]
    assert (target[0, 4:] == END_ID).all()
    assert (target[0, :4] == (packed[0, 136:140] & int(TOKEN))).all()


def test_only_masked_tokens_are_learned_from_their_left_neighbour() -> None:
    given = inputs()
    noisy, labels = (
        given.tokens[:, LENGTH:].unflatten(1, (-1, NOISY)),
        given.labels[:, LENGTH:].unflatten(1, (-1, NOISY)),
    )
    assert (labels[:, :, -1] == -100).all()
    assert ((labels[:, :, :-1] != -100) == (noisy[:, :, 1:] == MASK_ID)).all()
    assert MASK_ID not in labels
    assert given.weights[:, LENGTH:].sum() == pytest.approx(1.0)
    assert given.weights[:, :LENGTH].sum() == pytest.approx(diffusion.CLEAN_WEIGHT)


def test_a_noisy_block_is_computed_as_after_its_context_alone() -> None:
    network, given = random_network(), inputs()
    packed = packed_rows()
    ids = (packed & int(TOKEN)).long()
    documents = ((packed & int(STARTS)) != 0).int().cumsum(1)
    torch.manual_seed(5)
    starts, _ = diffusion.draw_blocks((packed & int(LEARNED)) != 0, 8)
    with torch.no_grad():
        hidden = network(given.tokens, given.cos, given.sin, given.mask)
        for row in range(2):
            for number, start in enumerate(starts[row].tolist()):
                first = int((documents[row] == documents[row, start]).int().argmax())
                at = LENGTH + number * NOISY
                block = given.tokens[row, at : at + NOISY]
                alone = torch.cat([ids[row, first:start], block])[None]
                seen = torch.ones(alone.shape[1], alone.shape[1], dtype=torch.bool).tril()
                seen[start - first :, start - first :] = True
                cos, sin = rotations(network.shape, alone.shape[1])
                wanted = network(alone, cos, sin, seen)[0, start - first :]
                assert torch.allclose(hidden[row, at : at + NOISY], wanted, atol=2e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_sparse_attention_sees_what_the_plain_mask_shows() -> None:
    plain, sparse = inputs("dense"), inputs("flex")
    network = random_network()
    with torch.no_grad():
        first = network(plain.tokens, plain.cos, plain.sin, plain.mask)
        second = network(sparse.tokens, sparse.cos, sparse.sin, sparse.mask)
    assert torch.equal(plain.tokens, sparse.tokens)
    assert torch.allclose(first, second, atol=2e-4)
    assert isinstance(plain.mask, Tensor)
    kept = sparse.mask.to_dense()  # type: ignore[union-attr]
    wide = kept.repeat_interleave(128, -1).repeat_interleave(128, -2).bool()
    assert not (plain.mask & ~wide).any(), "a block of keys that is seen was left out"


def test_denoising_is_the_same_alone_and_in_a_batch() -> None:
    network = random_network()
    contexts = [list(range(10, 10 + length)) for length in (3, 40, 17)]
    together = denoise(network, contexts, steps=8)
    assert together == [denoise(network, [context], steps=8)[0] for context in contexts]
    assert all(len(block) == NOISY and MASK_ID not in block for block in together)
