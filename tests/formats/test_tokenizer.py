"""The tokenizer: control tokens are found where they were meant, text is text, bytes are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from palaver.errors import BrokenModel
from palaver.formats.tokenizer import FastTokenizer
from tests.tiny import MERGES, THINK, TURNS, byte_level

DEFINITION = byte_level(merges=MERGES)
TOKENIZER = FastTokenizer(DEFINITION)
REFERENCE = Backend.from_str(DEFINITION)


@given(st.lists(st.one_of(st.sampled_from([*TURNS, *THINK]), st.text(max_size=8)), max_size=6))
def test_control_tokens_and_harmless_text_give_the_librarys_ids(parts: list[str]) -> None:
    text = "".join(parts)
    runs = [TOKENIZER.control.get(part, part) for part in parts]
    if not any(control in "".join(p for p in parts if p not in TOKENIZER.control) for control in TOKENIZER.control):
        assert TOKENIZER.encode(runs) == REFERENCE.encode(text, add_special_tokens=False).ids


@given(st.text())
def test_text_round_trips_through_the_vocabulary(text: str) -> None:
    assert b"".join(TOKENIZER.vocabulary[i] for i in TOKENIZER.encode([text])) == text.encode()


@given(st.lists(st.sampled_from([*TURNS, *THINK, "x", "\U000f0000", "\U000f0001"]), max_size=6))
def test_text_never_becomes_a_control_token(parts: list[str]) -> None:
    ids = TOKENIZER.encode(parts)
    assert not set(ids) & set(TOKENIZER.control.values())
    assert b"".join(TOKENIZER.vocabulary[i] for i in ids).decode() == "".join(parts)


def test_special_and_added_tokens_are_told_apart() -> None:
    assert TOKENIZER.special_ids == {TOKENIZER.control[text] for text in TURNS}


def test_a_broken_definition_is_one_sentence() -> None:
    for broken in ("{", "[]", '{"model": {"type": "None"}}'):
        with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
            FastTokenizer(broken)
