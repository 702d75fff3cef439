"""The tokenizer of a GGUF file: its vocabulary as a definition for the `tokenizers` library.

A GGUF file has the pieces, their kinds and merges, but only a name for the rule that splits text into words. The rules
here are those that the models' own tokenizer.json files have. A rule that is not known is refused by its name: text
that is split otherwise gives tokens that the model was not trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palaver.errors import BrokenModel, ModelError
from palaver.formats.tokenizer import HOLE, FastTokenizer, token_bytes
from palaver.gguf import GGUFHeader, TokenKind

SPACE = "▁"
"""Stands for a space in pieces of SentencePiece."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, letters: str = r"\p{L}", others: str = r"\p{L}\p{N}") -> str:
    """Contractions, words, groups of digits, punctuation and blanks."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}| ?[^\s{others}]+[\r\n]*|{_BLANKS}"


def _cased_words(digits: str, contractions: str = "") -> str:
    """Words that also end where a capital letter follows a small one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)
_LLAMA3 = (_words("{1,3}"),)
_QWEN2 = (_words(""),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_O200K = (_cased_words("{1,3}", f"{_CONTRACTIONS}?"),)
SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "phi-2", "mellum"), (_GPT2,)
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
         "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "grok-2", "megrez", "kormo"), _QWEN2),
    "qwen35": (_words("", r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"),),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    "tekken": (_cased_words(""),),
    "seed-coder": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",
    ),
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
}  # fmt: skip
"""The patterns that split a text before merging, one after the other, by `tokenizer.ggml.pre`."""
_WHOLE_WORDS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""Rules of vocabularies whose words are pieces even if no merges lead to them, and that begin texts with BOS."""
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as the format spells it
    "cls_token": "cls",
    "mask_token": "mask",
}


def load_gguf_tokenizer(header: GGUFHeader) -> FastTokenizer:
    """From the tokenizer.json in the file or beside it, else from the vocabulary. Raises BrokenModel or ModelError."""
    definition = header.text("tokenizer.huggingface.json") or _definition_beside(header.files[0])
    if definition is None:
        return FastTokenizer(build_definition(header))
    _check_same_pieces(header, definition)
    return FastTokenizer(definition)


def named_gguf_tokens(header: GGUFHeader) -> dict[str, str]:
    """The special tokens that templates read by name, such as bos_token."""
    pieces = header.pieces
    ids = {name: header.integer(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    return {name: pieces[i] for name, i in ids.items() if i is not None and 0 <= i < len(pieces)}


def build_definition(header: GGUFHeader) -> str:
    """The tokenizer.json of a vocabulary in metadata."""
    kind = header.text("tokenizer.ggml.model")
    if kind == "gpt2":
        spec = _byte_level(header)
    elif kind in ("llama", "gemma4"):
        spec = _sentencepiece(header, kind == "llama")
    else:
        raise ModelError(
            f"{header.name} has a tokenizer of the kind {kind!r}, which Palaver can't read: "
            "put the model's tokenizer.json beside the file."
        )
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **spec})


def _byte_level(header: GGUFHeader) -> dict[str, Any]:
    name = header.text("tokenizer.ggml.pre") or "none"
    if name not in SPLITS:
        raise ModelError(
            f"{header.name} splits text by the rule {name!r}, which Palaver doesn't know: "
            "put the model's tokenizer.json beside the file."
        )
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in SPLITS[name]
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    vocabulary = _vocabulary(header)
    model = _bpe(vocabulary, _merges(header, vocabulary)) | {"ignore_merges": name in _WHOLE_WORDS}
    return {
        "added_tokens": _added_tokens(header),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(header, default=name in _WHOLE_WORDS),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _sentencepiece(header: GGUFHeader, scored: bool) -> dict[str, Any]:
    """`scored`: merges follow from the pieces' scores; otherwise the file lists them."""
    vocabulary = _vocabulary(header)
    merges = _scored_merges(header, vocabulary) if scored else _merges(header, vocabulary)
    prefix = header.flag("tokenizer.ggml.add_space_prefix")
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if prefix is not False and scored:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    unknown = header.integer("tokenizer.ggml.unknown_token_id")
    pieces = header.pieces
    named = pieces[unknown] if unknown is not None and _kind_at(header, unknown) == TokenKind.UNKNOWN else None
    if unknown is not None and named is not None:
        del vocabulary[f"{HOLE}{unknown}"]
        vocabulary[named] = unknown
    model = _bpe(vocabulary, merges) | {"unk_token": named, "fuse_unk": True, "byte_fallback": True}
    return {
        "added_tokens": _added_tokens(header),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(header, default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _kind_at(header: GGUFHeader, token_id: int) -> int:
    kinds = header.token_kinds
    return kinds[token_id] if 0 <= token_id < len(kinds) else TokenKind.UNUSED


def _vocabulary(header: GGUFHeader) -> dict[str, int]:
    """The pieces that text is made of, and fillers for control tokens, so that text never becomes one."""
    vocabulary: dict[str, int] = {}
    for token_id, (piece, kind) in enumerate(zip(header.pieces, header.token_kinds, strict=True)):
        name = piece if kind in (TokenKind.NORMAL, TokenKind.BYTE) and piece not in vocabulary else f"{HOLE}{token_id}"
        vocabulary[name] = token_id
    return vocabulary


def _added_tokens(header: GGUFHeader) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": token_id, "content": piece, **flags, "special": kind != TokenKind.USER_DEFINED}
        for token_id, (piece, kind) in enumerate(zip(header.pieces, header.token_kinds, strict=True))
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN) and piece
    ]


def _merges(header: GGUFHeader, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """The merges of the file, without those that lead to or from control tokens."""
    out = []
    for merge in header.texts("tokenizer.ggml.merges") or ():
        left, _, right = merge.partition(" ")
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            out.append([left, right])
    return out


def _scored_merges(header: GGUFHeader, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """All ways to make a piece of two others, the pieces with the highest scores first."""
    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(header.pieces):
        raise BrokenModel(f"{header.name} has no scores for its vocabulary.")
    order = sorted(vocabulary.items(), key=lambda item: -float(scores[item[1]]))
    merges = []
    for piece, _ in order:
        splits = [(piece[:place], piece[place:]) for place in range(1, len(piece))]
        found = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges.extend(sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]])))
    return [list(pair) for pair in merges]


def _post_processor(header: GGUFHeader, default: bool) -> dict[str, Any] | None:
    """Puts the beginning-of-sequence token before a text, if the model's texts begin with one."""
    adds, token_id = header.flag("tokenizer.ggml.add_bos_token"), header.integer("tokenizer.ggml.bos_token_id")
    pieces = header.pieces
    if not (default if adds is None else adds) or token_id is None or not 0 <= token_id < len(pieces):
        return None
    bos, text = pieces[token_id], {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }


def _definition_beside(file: Path) -> str | None:
    path = file.with_name("tokenizer.json")
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _check_same_pieces(header: GGUFHeader, definition: str) -> None:
    """Raises BrokenModel if a tokenizer.json belongs to another model."""
    try:
        found = token_bytes(json.loads(definition))
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # FastTokenizer says what is wrong
    pieces, kinds = header.pieces, header.token_kinds
    for token_id, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        known = found[token_id] if token_id < len(found) else b""
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED) and known and known != piece.encode():
            raise BrokenModel(
                f"The tokenizer.json of {header.name} belongs to another model: token {token_id} is "
                f"{known.decode(errors='replace')!r} there and {piece!r} in the file."
            )
    if max(len(pieces), 1) < sum(1 for data in found if data):
        raise BrokenModel(f"The tokenizer.json of {header.name} belongs to another model: it has more tokens.")
