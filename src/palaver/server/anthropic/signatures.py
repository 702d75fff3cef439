"""Signatures of thoughts: the token ids that a thought was made of travel with it.

A client holds a thought as text, and text can be spelled by other tokens than the model chose. With its signature a
thought that comes back is the same tokens, on any server of the same model and after any restart. A signature keeps
no secret and proves nothing to a stranger: who wants to put words into a thought may send it without one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_OURS = "palaver"
_UNREADABLE = "this is no signature of a thought"
_MAX_BITS = 31


class InvalidSignature(ValueError):
    """A signature of ours that can't be read, or does not fit its thought."""


@dataclass(frozen=True, slots=True)
class SignedThinking:
    tokenizer: str
    """The fingerprint of the tokenizer whose ids these are."""
    ids: tuple[int, ...]
    """From the last thought before it in the same reply, or the reply's beginning, to this thought's end."""
    text: str


def sign(tokenizer: str, ids: Iterable[int], text: str, whole: bool) -> str:
    """`whole`: whether the text itself goes along, for a thought that is not shown."""
    about = {"tokenizer": tokenizer, "digest": _digest(text)} | ({"text": text} if whole else {})
    return ".".join((_OURS, _written(json.dumps(about).encode()), _written(_packed(ids))))


def parse_signature(signature: str, text: str) -> SignedThinking | None:
    """What a signature says of a thought; None where it is nobody's or another's. Raises Forged."""
    match signature.split("."):
        case [ours, about, ids] if ours == _OURS:
            return _fitting(_about(_read(about)), _unpacked(_read(ids)), text)
        case [ours, *_] if ours == _OURS:
            raise InvalidSignature(_UNREADABLE)
        case _:
            return None


def _fitting(about: Any, ids: tuple[int, ...], text: str) -> SignedThinking:
    match about:
        case {"tokenizer": str(tokenizer), "digest": str(digest), **rest}:
            said = text or rest.get("text", "")
        case _:
            raise InvalidSignature(_UNREADABLE)
    if not isinstance(said, str) or _digest(said) != digest:
        raise InvalidSignature("the thought was changed: send it as it came, or without a signature")
    return SignedThinking(tokenizer, ids, said)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _written(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _read(text: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        raise InvalidSignature(_UNREADABLE) from None


def _about(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidSignature(_UNREADABLE) from None


def _packed(ids: Iterable[int]) -> bytes:
    """Seven bits to a byte, the lowest first; the eighth says that more of the same id follow."""
    out = bytearray()
    for rest in ids:
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def _unpacked(data: bytes) -> tuple[int, ...]:
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
