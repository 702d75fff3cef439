"""The bytes that each token stands for, read off a tokenizer's definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(spec: Mapping[str, Any]) -> tuple[bytes, ...]:
    """By token id; ids without a token stand for nothing."""
    pieces = _pieces(spec["model"])
    added = {token["id"]: token["content"].encode() for token in spec.get("added_tokens", ())}
    convert = _converter(spec.get("decoder") or {})
    size = max((*pieces.values(), *added), default=-1) + 1
    out = [b""] * size
    for piece, token_id in pieces.items():
        out[token_id] = convert(piece)
    for token_id, data in added.items():
        out[token_id] = data
    return tuple(out)


def _pieces(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram models list pieces with their scores
        return {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _converter(decoder: Mapping[str, Any]) -> Callable[[str], bytes]:
    kinds = list(_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in kinds):
        return _byte_level
    marks = [_replacement(step) for step in kinds if step["type"] in ("Metaspace", "Replace")]
    return lambda piece: _spaced(piece, [mark for mark in marks if mark])


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder:
        yield decoder


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step.get("replacement", "▁"), " "
    pattern = step.get("pattern", {}).get("String")
    return (pattern, step["content"]) if pattern else None


def _spaced(piece: str, marks: list[tuple[str, str]]) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    for mark, text in marks:
        piece = piece.replace(mark, text)
    return piece.encode("utf-8", "surrogatepass")


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode("utf-8", "surrogatepass")


def _byte_table() -> dict[str, int]:
    """The printable stand-ins that byte-level vocabularies write their bytes with."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_table()
