"""Damaged files are decoded or refused: nothing crashes, nothing hangs. `benchmarks/media_fuzz.py` runs many more."""

from __future__ import annotations

import random

import pytest

from benchmarks.media_fuzz import decode, mutate, seeds
from palaver.media import MediaDecoder

SEEDS = seeds()


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_files_are_decoded_or_refused(name: str) -> None:
    decoder = MediaDecoder()
    try:
        assert decode(decoder, SEEDS[name]) == "decoded"
        outcomes = [decode(decoder, mutate(SEEDS[name], random.Random(seed))) for seed in range(20)]
        assert decode(decoder, SEEDS[name]) == "decoded"
    finally:
        decoder.close()
    assert any(outcome != "decoded" for outcome in outcomes)
    assert all("\n" not in outcome for outcome in outcomes)
