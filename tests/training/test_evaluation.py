"""Greedy and drawn replies come from the same batches, and both reach the model card."""

from __future__ import annotations

import pytest
import torch

from training import card
from training.bars import BARS
from training.evaluate import FORM_WANTED, compared, drawn, figures, outcomes, table
from training.generation import Sampling, defaults, writer
from training.tokenizer import SPROUT

shipped = pytest.mark.skipif(not (SPROUT / "model.safetensors").exists(), reason="no model has been trained yet")


@shipped
def test_a_greedy_reply_is_the_same_beside_drawn_ones() -> None:
    bars = tuple(bar for bar in BARS if bar.name in ("small facts", "+ and − to 4 digits"))
    model, asked = writer(SPROUT, torch.device("cpu")), drawn(bars, 2, 3)
    alone = outcomes(model, [(case, Sampling()) for case in asked], 8)
    torch.manual_seed(1)
    both = outcomes(model, [(case, how) for how in (Sampling(), defaults(SPROUT)) for case in asked], 8)
    assert [o.reply for o in both[: len(asked)]] == [o.reply for o in alone]
    assert len(both) == 2 * len(asked)
    rows = figures(bars, alone, "greedy") + figures(bars, both[len(asked) :], "default")
    assert [row["of"] for row in rows] == [2, 2, 4, 4] * 2
    assert table(rows).count("\n") == len(rows) - 1


def test_the_card_says_what_was_missed() -> None:
    row = {"bar": "sums", "sampling": "greedy", "right": 99, "of": 100, "wanted": FORM_WANTED}
    text = card.markdown({"figures": [row, {**row, "sampling": "default", "right": 100}]})
    assert text.split("\n")[2] == "| sums | 99.5% | 99 of 100: 99.00% (missed) | 100 of 100: 100.00% |"


def test_other_weights_are_preferred_if_no_bar_gets_worse() -> None:
    before = [
        {"bar": "sums", "sampling": "greedy", "right": 149, "of": 150, "wanted": 0.99},
        {"bar": "calls", "sampling": "greedy", "right": 136, "of": 150, "wanted": 0.98},
    ]
    better = [before[0], {**before[1], "right": 146}]
    text, preferred = compared(better, before)
    assert preferred
    assert text.split("\n")[0].split() == ["calls", "greedy", "136", "->", "146", "of", "150"]
    assert compared([{**before[0], "right": 148}, better[1]], before)[1] is False  # missed now, met before
    assert compared([before[0], {**before[1], "right": 134}], before)[1] is False
