"""What an engine needs to know of a GGUF file: sizes, end tokens and sampling defaults, from its metadata."""

from __future__ import annotations

from array import array
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
HALF_FLOATS = frozenset({"F16", "BF16"})
ROUNDED_BY_BATCH = HALF_FLOATS | {"Q4_K"}
"""Types of weights whose kernels for one row round differently from those for several, and for some row counts only."""
_VALUE_BYTES = {True: 4, False: 2}
"""By whether keys and values are stored in f32."""


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


def token_bytes(header: GGUFHeader, float32: bool) -> int:
    """The keys and values of one token in all layers; 1 for models without attention."""
    heads = header.model_integer("attention.head_count") if not _is_array(header, "attention.head_count") else None
    width = header.model_integer("embedding_length") or 0
    default = width // heads if heads else 128
    size = (header.model_integer("attention.key_length") or default) + (
        header.model_integer("attention.value_length") or default
    )
    return max(1, _kv_heads(header, heads) * size * _VALUE_BYTES[float32])


def _kv_heads(header: GGUFHeader, heads: int | None) -> int:
    """The key-value heads of all layers."""
    layers = header.model_integer("block_count")
    if layers is None or not 0 < layers <= len(header.tensors):
        raise BrokenModel(f"{header.name} doesn't say how many layers the model has.")
    if _is_array(header, "attention.head_count_kv"):
        counts = header.numbers(f"{header.architecture}.attention.head_count_kv")
        return sum(map(int, counts)) if counts is not None else 0
    return layers * (header.model_integer("attention.head_count_kv") or heads or 0)


def _is_array(header: GGUFHeader, key: str) -> bool:
    return isinstance(header.metadata.get(f"{header.architecture}.{key}"), array)


def is_mixture(header: GGUFHeader) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(header.model_integer("expert_count"))


def is_rounded_by_batch(header: GGUFHeader) -> bool:
    """Whether the bits of a reply depend on the requests beside it, whatever passes are made of them.

    Decided by the types of the tensors that rows are multiplied with. In a mixture, the rows of an expert depend on
    what the other rows choose.
    """
    names = {tensor.name for tensor in header.tensors}
    looked_up = {"token_embd.weight"} if "output.weight" in names else set()
    used = {tensor.type.name for tensor in header.tensors if len(tensor.shape) > 1 and tensor.name not in looked_up}
    return is_mixture(header) or bool(used & ROUNDED_BY_BATCH)


def weights_type(header: GGUFHeader) -> str:
    """The type of most of the weights, such as "Q4_K"."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "none"
