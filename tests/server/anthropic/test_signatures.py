from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaver.server.anthropic.signatures import InvalidSignature, SignedThinking, parse_signature, sign


def test_a_thought_comes_back_with_its_tokens() -> None:
    made = sign("fp", [5, 0, 70000], "a thought 👋", include_text=False)
    assert parse_signature(made, "a thought 👋") == SignedThinking("fp", (5, 0, 70000), "a thought 👋")
    hidden = sign("fp", [1], "a thought", include_text=True)
    assert parse_signature(hidden, "") == SignedThinking("fp", (1,), "a thought")
    assert parse_signature(sign("fp", [], "", include_text=False), "") == SignedThinking("fp", (), "")


@given(st.lists(st.integers(0, 2**31 - 1)), st.text(), st.booleans())
def test_any_thought_comes_back(ids: list[int], text: str, include_text: bool) -> None:
    made = sign("fp", ids, text, include_text)
    assert parse_signature(made, "" if include_text else text) == SignedThinking("fp", tuple(ids), text)


def test_what_is_not_ours_says_nothing() -> None:
    assert parse_signature("", "a thought") is None
    assert parse_signature("EqQBCgIYAhIM1gbcDa9GJwZA2b3h", "a thought") is None


@pytest.mark.parametrize("text", ["another", "a thought ", ""])
def test_a_changed_thought_is_known(text: str) -> None:
    with pytest.raises(InvalidSignature):
        parse_signature(sign("fp", [1], "a thought", include_text=False), text)


@pytest.mark.parametrize(
    ("about", "ids"),
    [
        (b"", b""),
        (b"nonsense", b""),
        (b"[" * 100_000, b""),
        (b"[]", b""),
        (b'{"tokenizer": "fp", "digest": "x"}', b""),
        (b'{"tokenizer": "fp", "digest": "e3b0c44298fc1c149afbf4c8996fb924", "text": 5}', b""),
        (b'{"tokenizer": "fp", "digest": "e3b0c44298fc1c149afbf4c8996fb924"}', b"\x80"),
        (b'{"tokenizer": "fp", "digest": "e3b0c44298fc1c149afbf4c8996fb924"}', b"\xff" * 9 + b"\x01"),
    ],
)
def test_what_is_made_up_is_refused(about: bytes, ids: bytes) -> None:
    written = [base64.urlsafe_b64encode(one).decode() for one in (about, ids)]
    with pytest.raises(InvalidSignature):
        parse_signature(".".join(("palaver", *written)), "")


@pytest.mark.parametrize("signature", ["palaver", "palaver.", "palaver.é.", "palaver.a.b", "palaver.e30=.e30=.e30="])
def test_what_is_no_signature_of_ours_but_says_so(signature: str) -> None:
    with pytest.raises(InvalidSignature):
        parse_signature(signature, "")
