"""The tokenizer and the network as they are shipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training import checkpoints
from training.export import as_qwen3
from training.network import Network, Shape, documents_mask, rotations
from training.shards import LEARNED, STARTS, TOKEN, encoded, packed
from training.tokenizer import ADDED, SPECIAL, SPROUT, load

SMALL = Shape(vocabulary=64, hidden=32, inner=48, layers=2, heads=4, key_heads=2, head=8)
shipped = pytest.mark.skipif(not (SPROUT / "tokenizer.json").exists(), reason="no tokenizer has been made yet")


@shipped
@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = load(SPROUT)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@shipped
def test_tokens_of_its_own() -> None:
    tokenizer = load(SPROUT)
    added = tokenizer.get_added_tokens_decoder().values()
    assert {t.content for t in added if t.special} == set(SPECIAL)
    assert {t.content for t in added if not t.special} == set(ADDED)
    assert tokenizer.get_vocab_size() == Shape().vocabulary
    assert tokenizer.encode("1234").tokens == list("1234")


@shipped
def test_rows_hold_whole_conversations() -> None:
    from itertools import islice

    from training.mixture import samples
    from training.phrasings import Split

    documents = encoded(load(SPROUT), list(islice(samples(1, 0, Split.TRAIN, ()), 300)))
    rows = packed(iter(documents), 1024, 12)
    assert rows.shape == (12, 1024)
    assert bool(np.all(rows[:, 0] & STARTS))
    assert int((rows & LEARNED != 0).sum()) > 1000
    assert int((rows & TOKEN).max()) < 4096


def test_the_network_is_qwen3() -> None:
    torch.manual_seed(0)
    network, tokens = Network(SMALL), torch.randint(0, 64, (2, 24))
    cos, sin = rotations(SMALL, 24)
    with torch.no_grad():
        ours = network.logits(network(tokens, cos, sin, None))
        theirs = as_qwen3(network, SMALL)(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_conversation_does_not_see_its_neighbours() -> None:
    torch.manual_seed(0)
    network, tokens = Network(SMALL), torch.randint(0, 64, (1, 24))
    documents = torch.tensor([[1] * 10 + [2] * 14])
    cos, sin = rotations(SMALL, 24)
    with torch.no_grad():
        together = network(tokens, cos, sin, documents_mask(documents, "dense"))[:, 10:]
        alone = network(tokens[:, 10:], cos[10:], sin[10:], None)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    network = Network(SMALL)
    optimizer = torch.optim.AdamW(network.parameters())
    tokens = torch.randint(0, 64, (1, 8))
    network.loss(network(tokens, *rotations(SMALL, 8), None), tokens).backward()
    optimizer.step()
    checkpoints.save(tmp_path, 5, network, optimizer)
    other = Network(SMALL)
    again = torch.optim.AdamW(other.parameters())
    assert checkpoints.load(tmp_path, other, again) == 5
    for ours, theirs in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(
            optimizer.state[ours]["exp_avg"], again.state[theirs]["exp_avg"], atol=1e-3, rtol=1e-2
        )
