"""What every engine needs to know of a GGUF file: end tokens, sampling defaults, context length, type of weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from palaver.errors import BadParameter, BrokenModel
from palaver.gguf import GGUFHeader, TokenKind
from palaver.sampling import NUMBERS, Sampling

_END_KEYS = ("eos", "eot", "eom")
END_TEXTS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "<turn|>",
    "<|return|>", "<|call|>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "[EOS]", "</s>",
})  # fmt: skip
"""Control tokens that end a turn, in every vocabulary that has them. Files often name only one of them."""
_NO_TURN_END = frozenset({"<|end|>"})
_CHANNELS = "<|channel|>"
"""In vocabularies with this token, <|end|> ends a channel and not a turn."""
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's own defaults, for files that have none. Few do."""
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
DEFAULT_CONTEXT = 4096


def end_ids(header: GGUFHeader) -> frozenset[int]:
    """The tokens that end a turn: those that the file names, and control tokens that always do."""
    pieces, kinds = header.pieces, header.token_kinds
    named = {header.integer(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS}
    ends = END_TEXTS - _NO_TURN_END if _CHANNELS in pieces else END_TEXTS
    known = {i for i, piece in enumerate(pieces) if kinds[i] == TokenKind.CONTROL and piece in ends}
    return frozenset(i for i in named | known if i is not None and 0 <= i < len(pieces))


def sampling_defaults(header: GGUFHeader) -> Sampling:
    """The file's own defaults, if it has any. Invalid values are ignored."""
    found = {name: _valid(name, header.number(f"general.sampling.{key}")) for name, key in _SAMPLING_KEYS.items()}
    settings = {name: value for name, value in found.items() if value is not None}
    return Sampling(**(settings or DEFAULTS))


def _valid(name: str, value: float | None) -> Any:
    try:
        return None if value is None else NUMBERS[name].check(float(str(np.float32(value))))  # 0.6, not 0.60000002
    except BadParameter:
        return None


def context_length(header: GGUFHeader) -> int:
    length = header.model_integer("context_length")
    if length is not None and length <= 0:
        raise BrokenModel(f"{header.name} says that the model has a context of {length} tokens.")
    return length or DEFAULT_CONTEXT


def weights_type(header: GGUFHeader) -> str:
    """The type of most of the weights, such as "Q4_K"."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "none"
