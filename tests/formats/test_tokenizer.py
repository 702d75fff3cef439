"""The tokenizer: control tokens are found where they were meant, text is text, bytes are exact."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

import palaver.models
from palaver.errors import BrokenModel
from palaver.formats import tokenizer
from palaver.formats.tokenizer import EncodingCache, FastTokenizer, encodes_runs_independently
from tests.tiny import MERGES, THINK, TURNS, byte_level

DEFINITION = byte_level(merges=MERGES)
TOKENIZER = FastTokenizer(DEFINITION)
REFERENCE = Backend.from_str(DEFINITION)
SPROUT = (Path(palaver.models.__file__).parent / "sprout" / "tokenizer.json").read_text(encoding="utf-8")
SPACED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PIECES = st.sampled_from([*TURNS, *THINK, " ", "\n", "  a", "b ", "é", "e\u0301", "12", "!?"])


@given(st.lists(st.one_of(st.sampled_from([*TURNS, *THINK]), st.text(max_size=8)), max_size=6))
def test_control_tokens_and_harmless_text_give_the_librarys_ids(parts: list[str]) -> None:
    text = "".join(parts)
    runs = [TOKENIZER.control.get(part, part) for part in parts]
    if not any(control in "".join(p for p in parts if p not in TOKENIZER.control) for control in TOKENIZER.control):
        assert TOKENIZER.encode(runs) == REFERENCE.encode(text, add_special_tokens=False).ids


@given(st.lists(st.lists(PIECES, max_size=6), max_size=4))
def test_cached_runs_give_the_ids_of_the_whole_text(texts: list[list[str]]) -> None:
    for cached, uncached in _both_ways():
        for text in texts:
            runs = [cached.control.get(part, part) for part in text]
            assert cached.encode(runs) == uncached.encode(runs)


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Prepend", "prepend": "x"}},
        {"normalizer": {"prepend": "x"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"prepend": "x"}]}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip", "strip_left": True}]}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"added_tokens": [{"id": 0, "content": "<s>", "special": True, "lstrip": False, "rstrip": True}]},
    ],
)
def test_some_tokenizers_do_not_encode_runs_independently(changed: dict[str, object]) -> None:
    assert encodes_runs_independently(json.loads(DEFINITION))
    assert not encodes_runs_independently(json.loads(_with(**changed)))


def test_nothing_is_cut_off() -> None:
    cutting = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    for definition in (_with(truncation=cutting), _with(truncation=cutting, pre_tokenizer=SPACED)):
        tokenizer = FastTokenizer(definition)
        ids = tokenizer.encode([tokenizer.control[TURNS[0]], "a text of many tokens, more than four"])
        assert len(ids) > 10


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(character) for character in text]

    monkeypatch.setattr(tokenizer, "ENTRY_OVERHEAD", 0)
    encodings = EncodingCache(encode, capacity=10)
    for text in ("abcd", "efgh", "abcd", "ijkl", "abcd", "efgh", "too long for it", "too long for it"):
        assert list(encodings(text)) == [ord(character) for character in text]
        assert encodings.size <= 10
    assert encoded == ["abcd", "efgh", "ijkl", "efgh", "too long for it", "too long for it"]


def _with(**changed: object) -> str:
    return _changed(DEFINITION, **changed)


def _changed(definition: str, **changed: object) -> str:
    return json.dumps({**json.loads(definition), **changed})


BLANKS = byte_level(added=[*THINK, "  ", "\n\n", "    ", "\u2581\u2581"], merges=[*MERGES, ("Ċ", "Ċ")])
SPACIOUS = FastTokenizer(BLANKS), Backend.from_str(BLANKS)


@given(st.lists(st.sampled_from([*TURNS, *THINK, " ", "\n", "a", "the", "\u2581"]), max_size=12))
def test_runs_of_spaces_and_lines_are_text(parts: list[str]) -> None:
    tokenizer, library = SPACIOUS
    assert set(tokenizer.control) == {*TURNS, *THINK}
    runs = [tokenizer.control.get(part, part) for part in parts]
    assert tokenizer.encode(runs) == library.encode("".join(parts), add_special_tokens=False).ids


@given(st.text(alphabet=" \nabc<i>", max_size=12))
def test_runs_of_spaces_that_are_pieces_too(text: str) -> None:
    """As in vocabularies that came from sentencepiece: spaces are letters, and tags are added tokens."""
    pieces = [*"\n\u2581abc<i>", "\u2581\u2581", "\n\n", "\u2581a", "<i>"]
    blank = {"special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = [{"id": pieces.index(piece), "content": piece, **blank} for piece in ("\u2581\u2581", "\n\n", "<i>")]
    merges = [["\u2581", "\u2581"], ["\n", "\n"], ["\u2581", "a"]]
    definition = _with(
        added_tokens=added,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        pre_tokenizer=None,
        model={**json.loads(DEFINITION)["model"], "vocab": {p: i for i, p in enumerate(pieces)}, "merges": merges},
    )
    tokenizer = FastTokenizer(definition)
    assert set(tokenizer.control) == {"<i>"}
    ids = tokenizer.encode([text])
    assert tokenizer.control["<i>"] not in ids
    if "<i>" not in text:
        assert ids == Backend.from_str(definition).encode(text, add_special_tokens=False).ids


def test_a_vocabulary_that_spells_control_tokens() -> None:
    """Only they are taken apart, with whatever else is in the text."""
    spelled = _with(added_tokens=[{**_added(DEFINITION)[0], "content": "th", "id": 256}])
    assert json.loads(spelled)["model"]["vocab"]["th"] == 256
    for definition in (spelled, _changed(spelled, pre_tokenizer=SPACED)):
        tokenizer = FastTokenizer(definition)
        for text in ("in there, in", "in there\U000ffffe", "\U0010ffff th"):
            ids = tokenizer.encode([text])
            assert 256 not in ids
            decoded = b"".join(tokenizer.vocabulary[i] for i in ids).decode()
            assert decoded.replace(" ", "") == text.replace(" ", "")
        assert len(tokenizer.encode(["inner inner there"])) < len("inner inner there")


@cache
def _both_ways() -> list[tuple[FastTokenizer, FastTokenizer]]:
    """Tokenizers with a cache of runs, and the same ones that encode the whole text."""
    pairs = []
    for definition in (SPROUT, DEFINITION, _with(normalizer={"type": "NFC"})):
        cached, uncached = FastTokenizer(definition), FastTokenizer(definition)
        assert cached._cache is not None
        uncached._cache = None
        pairs.append((cached, uncached))
    return pairs


def _added(definition: str) -> list[dict[str, object]]:
    return json.loads(definition)["added_tokens"]


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
