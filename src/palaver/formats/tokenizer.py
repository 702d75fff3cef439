"""The tokenizer as formats see it: runs of text and control tokens to ids, ids to bytes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from palaver.errors import BrokenModel, UnsupportedContent
from palaver.formats.markers import match_any
from palaver.phases import Vocabulary

ROOM = 2_000_000
"""Characters of the texts that are remembered."""
EACH = 100
"""What a text counts beside its characters."""

_PLAIN_NORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_PLAIN_SPLITS = frozenset({"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})


def reads_parts_alone(spec: Mapping[str, Any]) -> bool:
    """Told by its definition. Some put a space before the first word of all, or take spaces into a control token."""
    norms = all(part.get("type") in _PLAIN_NORMS for part in _steps(spec.get("normalizer"), "normalizers"))
    splits = all(map(_splits_alone, _steps(spec.get("pre_tokenizer"), "pretokenizers")))
    added = spec.get("added_tokens") or ()
    strict = not any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word"))
    return norms and splits and strict


def _steps(step: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    if step is None:
        return ()
    if step.get("type") == "Sequence":
        return [inner for part in step[name] for inner in _steps(part, name)]
    return (step,)


def _splits_alone(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")  # the library reads some without
    return kind in _PLAIN_SPLITS or (kind == "ByteLevel" and not part.get("add_prefix_space", True))


class EncodingCache:
    """The ids of texts, those used longest ago forgotten first. Any thread may ask."""

    def __init__(self, encode: Callable[[str], Sequence[int]], room: int = ROOM) -> None:
        self._encode = encode
        self._room = room
        self._held: OrderedDict[str, array[int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> Sequence[int]:
        with self._lock:
            ids = self._held.get(text)
            if ids is not None:
                self._held.move_to_end(text)
                return ids
        ids = array("I", self._encode(text))
        with self._lock:
            self._hold(text, ids)
        return ids

    @property
    def size(self) -> int:
        """Characters that are held, and what each text costs beside them."""
        return self._size

    def _hold(self, text: str, ids: array[int]) -> None:
        if text in self._held or len(text) + EACH > self._room:
            return
        self._held[text] = ids
        self._size += len(text) + EACH
        while self._size > self._room:
            oldest, _ = self._held.popitem(last=False)
            self._size -= len(oldest) + EACH


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
    kinds = list(_decoder_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in kinds):
        return _byte_level
    marks = [_replacement(step) for step in kinds if step["type"] in ("Metaspace", "Replace")]
    return lambda piece: _spaced(piece, [mark for mark in marks if mark])


def _decoder_steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
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

Run = str | int
"""Ordinary text, whatever it spells, or the id of a control token."""

_NAMES = range(0xF0000, 0xFFFFE)
_LONG = 1 << 16
_BLANKS = " \t\n\r\u2581"
_BARE = {"post_processor": None, "truncation": None, "padding": None}
"""Nothing is put around a text, and nothing of it is cut off."""


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def control(self) -> Mapping[str, int]:
        """The strings that are tokens of their own, special or merely added."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Those of them that are never text."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for two tokenizers only if they give the same ids."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that this model's texts begin with, such as a beginning-of-sequence token."""
        ...

    def encode(self, runs: Iterable[Run]) -> list[int]:
        """The ids of the runs in one piece: text is split where control tokens stand, and nowhere else."""
        ...


@dataclass(frozen=True)
class AddedToken:
    id: int
    content: str
    special: bool

    @property
    def blank(self) -> bool:
        """Some vocabularies have runs of spaces and lines as added tokens: those are text, and found in it."""
        return not self.special and not self.content.strip(_BLANKS)


class FastTokenizer:
    """A tokenizer from a `tokenizer.json`. Its added tokens go by private names, so that only control tokens
    that were meant as such are found, by the library's own rules, and the same letters in a text are text."""

    def __init__(self, definition: str) -> None:
        self._definition = definition
        spec = _parsed(definition)
        added = [AddedToken(t["id"], t["content"], t["special"]) for t in spec.get("added_tokens", ())]
        control = [token for token in added if not token.blank]
        blank = {token.id: token.content for token in added if token.blank}
        self.control: Mapping[str, int] = {token.content: token.id for token in control}
        self.special_ids = frozenset(token.id for token in control if token.special)
        self._names = dict(zip((token.id for token in control), map(chr, _NAMES), strict=False))
        self._whole = _Encoder(spec, {**self._names, **blank})
        self._plain = _Encoder(spec, blank)
        self._remembered = EncodingCache(self._encode_safely) if reads_parts_alone(spec) else None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return token_bytes(_parsed(self._definition))

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._definition.encode()).hexdigest()[:16]

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that this model's texts begin with, such as a beginning-of-sequence token."""
        framed = _backend(_parsed(self._definition)).encode("a", add_special_tokens=True).ids
        return tuple(itertools.takewhile(self.special_ids.__contains__, framed))

    def encode(self, runs: Iterable[Run]) -> list[int]:
        runs = _joined(runs)
        if self._remembered is not None:
            return [i for run in runs for i in ((run,) if isinstance(run, int) else self._remembered(run))]
        if any(_holds_a_name(run) for run in runs if isinstance(run, str)):
            return self._encode_alone(runs)
        ids = self._whole("".join(run if isinstance(run, str) else self._names[run] for run in runs))
        meant = sum(isinstance(run, int) for run in runs)
        return ids if sum(token_id in self._names for token_id in ids) == meant else self._encode_alone(runs)

    def _encode_alone(self, runs: Sequence[Run]) -> list[int]:
        """Each run by itself."""
        return [i for run in runs for i in ([run] if isinstance(run, int) else self._encode_safely(run))]

    def _encode_safely(self, text: str) -> list[int]:
        """A few vocabularies spell control tokens as ordinary pieces; those, and no more, are taken apart."""
        ids = self._plain(text)
        if self._names.keys().isdisjoint(ids):
            return ids
        return [i for part in self._control_pattern.split(text) if part for i in self._taken_apart(part)]

    def _taken_apart(self, text: str) -> list[int]:
        ids = self._plain(text)
        if self._names.keys().isdisjoint(ids):
            return ids
        return [token_id for character in text for token_id in self._plain(character)]

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return match_any(self.control)


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Texts that follow each other are one."""
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else 0
        if isinstance(run, str) and isinstance(last, str):
            out[-1] = last + run
        else:
            out.append(run)
    return out


class _Encoder:
    """The library's tokenizer with these of its added tokens alone, each under the name given for it."""

    def __init__(self, spec: Mapping[str, Any], names: Mapping[int, str]) -> None:
        tokens = [token for token in spec.get("added_tokens", ()) if token["id"] in names]
        added = [{**token, "content": names[token["id"]]} for token in tokens]
        self._backend = _backend({**spec, **_BARE, "added_tokens": added})
        found = {self._backend.token_to_id(name): token_id for token_id, name in names.items()}
        self._ids = {theirs: ours for theirs, ours in found.items() if theirs != ours}
        """The library numbers added tokens anew."""

    def __call__(self, text: str) -> list[int]:
        """A long text goes the library's way for many at once: it is quicker, and other threads run meanwhile."""
        try:
            if len(text) < _LONG:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            else:
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:  # the library takes what UTF-8 can hold
            raise UnsupportedContent("A text holds half of a character (a lone surrogate).") from None
        return [self._ids.get(token_id, token_id) for token_id in ids] if self._ids else ids


def _parsed(definition: str) -> dict[str, Any]:
    try:
        spec = json.loads(definition)
    except ValueError as error:
        raise BrokenModel(f"The model's tokenizer.json is not JSON ({error}): download the model again.") from None
    if not isinstance(spec, dict):
        raise BrokenModel("The model's tokenizer.json holds no tokenizer: download the model again.")
    return spec


def _backend(spec: Mapping[str, Any]) -> Any:
    try:
        return Backend.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare exceptions
        raise BrokenModel(f"The model's tokenizer.json can't be used ({error}): download the model again.") from None


def _holds_a_name(text: str) -> bool:
    return bool(text) and max(text) >= chr(_NAMES.start)


def load_tokenizer(folder: Path) -> FastTokenizer:
    """The tokenizer of a model's folder; one in an older file form is converted by the transformers library."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return FastTokenizer(path.read_text(encoding="utf-8"))
    return FastTokenizer(_converted(folder))


def _converted(folder: Path) -> str:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        definition: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # the library raises many kinds
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenModel(f"The folder {str(folder)!r} holds no tokenizer that can be read ({why}).") from None
    return definition
