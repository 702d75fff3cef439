"""Thinking signatures: they carry the token ids of a thinking block.

A client stores thinking as text, and the same text can be encoded as other tokens than the model generated. With its
signature a block that is sent back becomes the same tokens, on any server of the same model and after any restart. A
signature is neither secret nor a proof of origin: a client may also send thinking of its own without one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_PREFIX = "palaver"
_UNREADABLE = "this is no signature of a thought"
_MAX_BITS = 31


class InvalidSignature(ValueError):
    """A signature of Palaver that can't be decoded, or does not match its text."""


@dataclass(frozen=True, slots=True)
class SignedThinking:
    tokenizer: str
    """The fingerprint of the tokenizer whose ids these are."""
    ids: tuple[int, ...]
    """From the end of the previous thinking block of the reply, or the reply's beginning, to the end of this block."""
    text: str


def sign(tokenizer: str, ids: Iterable[int], text: str, include_text: bool) -> str:
    """`include_text`: for thinking that is not shown to the client."""
    header = {"tokenizer": tokenizer, "digest": _digest(text)} | ({"text": text} if include_text else {})
    return ".".join((_PREFIX, _encode(json.dumps(header).encode()), _encode(_pack(ids))))


def parse_signature(signature: str, text: str) -> SignedThinking | None:
    """The signed thinking; None if there is no signature or another service made it. Raises InvalidSignature."""
    match signature.split("."):
        case [prefix, header, ids] if prefix == _PREFIX:
            return _verify(_parse_header(_decode(header)), _unpack(_decode(ids)), text)
        case [prefix, *_] if prefix == _PREFIX:
            raise InvalidSignature(_UNREADABLE)
        case _:
            return None


def _verify(header: Any, ids: tuple[int, ...], text: str) -> SignedThinking:
    match header:
        case {"tokenizer": str(tokenizer), "digest": str(digest), **rest}:
            thinking = text or rest.get("text", "")
        case _:
            raise InvalidSignature(_UNREADABLE)
    if not isinstance(thinking, str) or _digest(thinking) != digest:
        raise InvalidSignature("the thinking was changed: send it unchanged, or without a signature")
    return SignedThinking(tokenizer, ids, thinking)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        raise InvalidSignature(_UNREADABLE) from None


def _parse_header(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidSignature(_UNREADABLE) from None


def _pack(ids: Iterable[int]) -> bytes:
    """LEB128: seven bits per byte, the lowest first; the eighth bit is set if more bytes follow."""
    out = bytearray()
    for rest in ids:
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def _unpack(data: bytes) -> tuple[int, ...]:
    ids: list[int] = []
    value = bits = 0
    for byte in data:
        value |= (byte & 0x7F) << bits
        bits += 7
        if byte < 0x80:
            ids.append(value)
            value = bits = 0
        elif bits > _MAX_BITS:
            raise InvalidSignature(_UNREADABLE)
    if bits:
        raise InvalidSignature(_UNREADABLE)
    return tuple(ids)
