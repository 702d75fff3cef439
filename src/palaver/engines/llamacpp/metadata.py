"""What llama.cpp needs to know of a GGUF file beside what every engine does: sizes of its cache, and how it rounds."""

from __future__ import annotations

from array import array

from palaver.errors import BrokenModel
from palaver.gguf import GGUFHeader

HALF_FLOATS = frozenset({"F16", "BF16"})
ROUNDED_BY_BATCH = HALF_FLOATS | {"Q4_K"}
"""Types of weights whose kernels for one row round differently from those for several, and for some row counts only."""
_VALUE_BYTES = {True: 4, False: 2}
"""By whether keys and values are stored in f32."""


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
