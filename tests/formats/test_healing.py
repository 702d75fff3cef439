"""Token healing: the end of a partial reply that a longer token extends is cut off; control tokens stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.prefill import Healer
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.messages import assistant, user
from tests.tiny import CHATML, MERGES, STRINGS, byte_level

TOKENIZER = FastTokenizer(byte_level(merges=MERGES))
FORMAT = TemplateFormat(Template(CHATML), TOKENIZER, STRINGS)
HEALER = Healer(TOKENIZER.vocabulary, TOKENIZER.control.values())


def data(ids: tuple[int, ...]) -> bytes:
    return b"".join(TOKENIZER.vocabulary[i] for i in ids)


EMPTY_THOUGHT = b"<think>\n\n</think>\n\n"
"""The model thinks by default, so an answer without a thought follows an empty one."""


def test_the_longest_end_that_a_token_goes_beyond_is_cut_off() -> None:
    prompt = FORMAT.render([user("x")], options=RenderOptions(healing=True), partial_reply=assistant("I say th"))
    assert prompt.healing == b"th"  # `thi` and `think` are tokens
    assert data(prompt.reply_ids) == EMPTY_THOUGHT + b"I say "
    whole = FORMAT.render([user("x")], partial_reply=assistant("I say th"))
    assert whole.healing == b""
    assert data(whole.reply_ids) == EMPTY_THOUGHT + b"I say th"


def test_control_tokens_are_never_cut_off() -> None:
    ids = (TOKENIZER.control["<think>"],)
    assert HEALER.heal(ids) == (ids, b"")


@given(st.text())
def test_what_is_cut_off_and_what_stays_are_the_whole(text: str) -> None:
    ids = tuple(TOKENIZER.encode([text]))
    stays, healing = HEALER.heal(ids)
    assert data(stays) + healing == text.encode()
    assert ids[: len(stays)] == stays
    if healing:
        assert any(word.startswith(healing) and len(word) > len(healing) for word in TOKENIZER.vocabulary)
