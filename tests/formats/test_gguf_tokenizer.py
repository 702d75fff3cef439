"""The tokenizer of a GGUF file: llama.cpp's ids, and text never becomes control tokens."""

from __future__ import annotations

import ctypes
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from palaver.errors import BrokenModel, ModelError
from palaver.formats.gguf_tokenizer import (
    SPLITS,
    build_definition,
    load_gguf_tokenizer,
    named_gguf_tokens,
)
from palaver.formats.tokenizer import FastTokenizer
from palaver.gguf import read_gguf
from palaver.models.resolver import resolve_folder
from tests.gguf_files import BYTE, CONTROL, NORMAL, USER_DEFINED, tokenizer_metadata, write_gguf

SNIPPETS = [
    "the", "The", "THE", " cat", "HelloWorld", "camelCase", "XMLHttp", "Straße", "naïve", "don't", "I'LL", "we've",
    "it's", "'s", "'", "’s", "1", "12", "123", "1234567", "3.14", "2024-05-06", "½", "٣", " ", "  ", "   ", "\t", "\n",
    "\n\n", "\r\n", " \n ", "    \n", ".", "...", "!?", "//", "/*", "#include", "()", "{}", "[0]", "<b>", "$x", "+=",
    "-", "--", "_a", "~", "a/b", ";\n",
    "你好", "世界。", "こんにちは", "안녕", "привет", "Ωμέγα", "é", "e\u0301", "नमस्ते",
    "👋", "👩🏽‍🚀", "…", "—", "“q”", "€5", "\u00a0",
]  # fmt: skip
ASCII = [snippet for snippet in SNIPPETS if snippet.isascii()]
CASED = ("tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2")
"""llama.cpp tells capital letters from small ones only in ASCII; the models' own rules do so everywhere."""


def make_texts(snippets: Sequence[str], count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(snippets, k=rng.randrange(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def vocabulary() -> str:
    """A byte-level vocabulary whose merges cross every boundary, so that a wrong split changes the ids."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = Decoder()
    trainer = BpeTrainer(
        vocab_size=1500, initial_alphabet=ByteLevel.alphabet(), show_progress=False, max_token_length=8
    )
    backend.train_from_iterator(make_texts(SNIPPETS, 4000, 1), trainer)
    spec = json.loads(backend.to_str())
    added = [("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    size = len(spec["model"]["vocab"])
    spec["added_tokens"] = [
        {"id": size + place, "content": text, "special": special, **flags}
        for place, (text, special) in enumerate(added)
    ]
    return json.dumps(spec)


def open_vocabulary(path: Path) -> Callable[[str], list[int]]:
    """llama.cpp's own tokenizer of a file, without parsing control tokens."""
    from palaver.engines.llamacpp.library import load_library

    library = load_library()
    params = library.llama_model_default_params()
    params.vocab_only = True
    paths = (ctypes.c_char_p * 1)(os.fsencode(path))
    model = library.llama_model_load_from_splits(paths, 1, params)
    assert model, library.last_error
    pointer = library.llama_model_get_vocab(model)

    def tokenize(text: str) -> list[int]:
        data, ids = text.encode(), (ctypes.c_int32 * 4096)()
        own = library.llama_tokenize
        number, pointed, flag = ctypes.c_int32, ctypes.c_void_p, ctypes.c_bool
        own.argtypes = (pointed, ctypes.c_char_p, number, pointed, number, flag, flag)
        return list(ids[: own(pointer, data, len(data), ids, len(ids), False, False)])

    return tokenize


HEADER: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 1,
    "qwen3.context_length": 64,
    "qwen3.embedding_length": 32,
    "qwen3.attention.head_count": 1,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
}


@pytest.mark.parametrize("rule", SPLITS)
def test_ids_are_those_of_llama_cpp(rule: str, vocabulary: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")
    path = write_gguf(tmp_path / "v.gguf", HEADER | tokenizer_metadata(vocabulary, rule, whole=False))
    ours, own = load_gguf_tokenizer(read_gguf(path)), open_vocabulary(path)
    for text in make_texts(ASCII if rule in CASED else SNIPPETS, 400, 2):
        assert ours.encode([text]) == own(text), repr(text)


def sentencepiece(tmp_path: Path, **extra: Any) -> Path:
    """A vocabulary with scores, as SentencePiece trains them."""
    words = ["▁", "t", "h", "e", "a", "c", "▁t", "he", "▁the", "▁c", "at", "▁cat", "1", "2", "12", ".", "▁▁"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<start_of_turn>", "\n\n"]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), CONTROL, USER_DEFINED]
    scores = [0.0] * 259 + [-float(place) for place in range(len(words))] + [0.0, 0.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return write_gguf(tmp_path / "s.gguf", HEADER | metadata | extra)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_llama_cpp(prefix: bool, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")
    path = sentencepiece(tmp_path, **{"tokenizer.ggml.add_space_prefix": prefix})
    ours, own = load_gguf_tokenizer(read_gguf(path)), open_vocabulary(path)
    for text in make_texts(["the", " cat", "a", "  ", "12", ".", "é", "\n", "你", " t"], 400, 3):
        assert ours.encode([text]) == own(text), repr(text)
    assert b"".join(ours.vocabulary[i] for i in ours.encode(["the cat é"])).lstrip() == "the cat é".encode()


def test_special_tokens_of_sentencepiece(tmp_path: Path) -> None:
    header = read_gguf(sentencepiece(tmp_path))
    tokenizer = load_gguf_tokenizer(header)
    assert tokenizer.prefix == (1,)
    assert named_gguf_tokens(header) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert "<start_of_turn>" in tokenizer.control
    assert "\n\n" not in tokenizer.control
    turn = tokenizer.control["<start_of_turn>"]
    assert tokenizer.encode([turn, "the cat"])[0] == turn
    assert turn not in tokenizer.encode(["<start_of_turn>the cat"])


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "tekken", "deepseek-v3"])
def test_text_never_becomes_control_tokens(rule: str, vocabulary: str, tmp_path: Path) -> None:
    header = read_gguf(write_gguf(tmp_path / "v.gguf", tokenizer_metadata(vocabulary, rule, whole=False)))
    tokenizer = load_gguf_tokenizer(header)
    control = set(tokenizer.control.values())
    assert len(control) == 3
    for text in ("<|im_start|>", "a<|im_end|>b", "<think>", " <|im_start|>user\n<think>"):
        ids = tokenizer.encode([text])
        assert control.isdisjoint(ids)
        assert b"".join(tokenizer.vocabulary[i] for i in ids) == text.encode()
    start = tokenizer.control["<|im_start|>"]
    assert tokenizer.encode([start, "user"])[0] == start


def test_control_tokens_may_stand_before_the_pieces(vocabulary: str, tmp_path: Path) -> None:
    """As in vocabularies of Mistral, where the first thousand ids are control tokens."""
    metadata = tokenizer_metadata(vocabulary, "tekken", whole=False)
    control, kinds = ["<s>", "[INST]", "<pad>"], [CONTROL, CONTROL, CONTROL]
    metadata["tokenizer.ggml.tokens"] = control + metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"] = kinds + metadata["tokenizer.ggml.token_type"]
    moved = load_gguf_tokenizer(read_gguf(write_gguf(tmp_path / "m.gguf", metadata)))
    plain = write_gguf(tmp_path / "p.gguf", tokenizer_metadata(vocabulary, "tekken", whole=False))
    tokenizer = load_gguf_tokenizer(read_gguf(plain))
    assert moved.vocabulary[3:] == tokenizer.vocabulary
    for text in make_texts(SNIPPETS, 50, 4):
        assert moved.encode([text]) == [token_id + 3 for token_id in tokenizer.encode([text])]
    assert moved.encode([1, "the"]) == [1, *(token_id + 3 for token_id in tokenizer.encode(["the"]))]


def test_sprout_is_read_from_its_definition_in_the_file(tmp_path: Path) -> None:
    definition = (resolve_folder("sprout") / "tokenizer.json").read_text()
    header = read_gguf(write_gguf(tmp_path / "s.gguf", tokenizer_metadata(definition)))
    tokenizer = load_gguf_tokenizer(header)
    assert tokenizer.fingerprint == FastTokenizer(definition).fingerprint


def test_unknown_rules_are_named_and_a_definition_beside_the_file_helps(vocabulary: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", tokenizer_metadata(vocabulary, "brand-new", whole=False))
    with pytest.raises(ModelError, match=r"'brand-new'.*tokenizer\.json"):
        load_gguf_tokenizer(read_gguf(path))
    (tmp_path / "tokenizer.json").write_text(vocabulary)
    assert load_gguf_tokenizer(read_gguf(path)).encode(["the cat"])


def test_a_definition_of_another_model_is_refused(vocabulary: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", tokenizer_metadata(vocabulary, whole=False))
    (tmp_path / "tokenizer.json").write_text((resolve_folder("sprout") / "tokenizer.json").read_text())
    with pytest.raises(BrokenModel, match="belongs to another model"):
        load_gguf_tokenizer(read_gguf(path))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 kinds"),
        ({"tokenizer.ggml.tokens": "text"}, "wrong type"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
        ({"tokenizer.ggml.model": 7}, "wrong type"),
    ],
)
def test_broken_vocabularies_end_in_one_sentence(
    changes: dict[str, Any], why: str, vocabulary: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "v.gguf", tokenizer_metadata(vocabulary, whole=False) | changes)
    with pytest.raises(ModelError, match=why):
        load_gguf_tokenizer(read_gguf(path))


def test_definitions_are_read_by_the_library(vocabulary: str, tmp_path: Path) -> None:
    header = read_gguf(write_gguf(tmp_path / "v.gguf", tokenizer_metadata(vocabulary, whole=False)))
    assert FastTokenizer(build_definition(header)).vocabulary == FastTokenizer(vocabulary).vocabulary
