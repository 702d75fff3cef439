"""Broken replies: no exception, nothing lost, the same events in every cut. `tests/formats/fuzz.py` tries many more."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.events import fold
from tests.formats import fuzz
from tests.formats.families import FAMILIES, Family, Kind

subject = cache(fuzz.subject)
ALL = [(family, kind) for family in FAMILIES.values() for kind in Kind]


@pytest.mark.parametrize(("family", "kind"), ALL, ids=lambda value: getattr(value, "name", str(value)))
def test_broken_replies(family: Family, kind: Kind) -> None:
    rng = random.Random(f"{family.name} {kind}")
    for _ in range(100):
        text = fuzz.broken(subject(family, kind), rng)
        assert fuzz.trial(subject(family, kind), text, rng) == "", text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ALL), st.data())
def test_anything_is_read_the_same_in_every_cut(which: tuple[Family, Kind], data: st.DataObject) -> None:
    chosen = subject(*which)
    scraps = st.sampled_from([*which[0].markers, *which[0].turns, *fuzz._SCRAPS])
    text = "".join(data.draw(st.lists(st.one_of(scraps, st.text(max_size=4)), max_size=14)))
    thinks, calls = data.draw(st.sampled_from(list(chosen.prompts)))
    stops = data.draw(st.sampled_from(((), ("tree",), ("\n\n", "<"))))
    whole = fold(chosen.read(fuzz.tokens(chosen, text, None), thinks, calls, stops))
    cut = fold(
        chosen.read(fuzz.tokens(chosen, text, data.draw(st.randoms(use_true_random=False))), thinks, calls, stops)
    )
    assert cut == whole
