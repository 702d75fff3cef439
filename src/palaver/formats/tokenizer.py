"""The tokenizer of formats: encodes runs of text and control tokens to ids, and maps ids to bytes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cachetools import LRUCache
from tokenizers import Tokenizer as Backend

from palaver.errors import BrokenModel, UnsupportedContent
from palaver.formats.markers import match_any
from palaver.phases import Vocabulary

MAX_CACHED_CHARACTERS = 2_000_000
"""The size of the cache of encoded texts."""
ENTRY_OVERHEAD = 100
"""Characters that each entry of the cache counts in addition to its text."""

_INDEPENDENT_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_INDEPENDENT_SPLITTERS = frozenset({"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRIVATE_NAMES = range(0xF0000, 0xFFFFE)
HOLE = "\U0010fffd"
"""The first character of pieces that only fill an id: the library would give the ids of gaps to added tokens."""
_LONG_TEXT = 1 << 16
_BLANKS = " \t\n\r\u2581"
_NO_PROCESSING = {"post_processor": None, "truncation": None, "padding": None}
"""No special tokens are added, and nothing is truncated or padded."""

Run = str | int
"""Plain text, even if it spells a control token, or the id of a control token."""


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def control(self) -> Mapping[str, int]:
        """The ids of added tokens by their text, special or not."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which are never text."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they give the same ids."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that this model's texts begin with, such as a beginning-of-sequence token."""
        ...

    def encode(self, runs: Iterable[Run]) -> list[int]:
        """The ids of the runs as one text, which control tokens split."""
        ...


@dataclass(frozen=True)
class AddedToken:
    id: int
    content: str
    special: bool

    @property
    def blank(self) -> bool:
        """Whether it is a run of white space, which some vocabularies add as a token: it is text."""
        return not self.special and not self.content.strip(_BLANKS)


class FastTokenizer:
    """A tokenizer from a `tokenizer.json`.

    The `tokenizers` library knows the control tokens by private-use characters as names, so that it finds only control
    tokens that are given by id. The text of a control token in a content stays text."""

    def __init__(self, definition: str) -> None:
        self._definition = definition
        spec = _parse_definition(definition)
        added = [AddedToken(t["id"], t["content"], t["special"]) for t in spec.get("added_tokens", ())]
        control = [token for token in added if not token.blank]
        blank = {token.id: token.content for token in added if token.blank}
        self.control: Mapping[str, int] = {token.content: token.id for token in control}
        self.special_ids = frozenset(token.id for token in control if token.special)
        self._names = dict(zip((token.id for token in control), map(chr, _PRIVATE_NAMES), strict=False))
        self._with_control = _Encoder(spec, {**self._names, **blank})
        self._without_control = _Encoder(spec, blank)
        self._cache = EncodingCache(self._encode_text) if encodes_runs_independently(spec) else None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return token_bytes(_parse_definition(self._definition))

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._definition.encode()).hexdigest()[:16]

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that this model's texts begin with, such as a beginning-of-sequence token."""
        framed = _backend(_parse_definition(self._definition)).encode("a", add_special_tokens=True).ids
        return tuple(itertools.takewhile(self.special_ids.__contains__, framed))

    def encode(self, runs: Iterable[Run]) -> list[int]:
        runs = _join_texts(runs)
        if self._cache is not None:
            return [i for run in runs for i in ((run,) if isinstance(run, int) else self._cache(run))]
        if any(_contains_name(run) for run in runs if isinstance(run, str)):
            return self._encode_each(runs)
        ids = self._with_control("".join(run if isinstance(run, str) else self._names[run] for run in runs))
        expected = sum(isinstance(run, int) for run in runs)
        return ids if sum(token_id in self._names for token_id in ids) == expected else self._encode_each(runs)

    def _encode_each(self, runs: Sequence[Run]) -> list[int]:
        """Encodes each run separately."""
        return [i for run in runs for i in ([run] if isinstance(run, int) else self._encode_text(run))]

    def _encode_text(self, text: str) -> list[int]:
        """Encodes a text without control tokens. Some vocabularies also have a control token as an ordinary piece: its
        text is encoded by character."""
        ids = self._without_control(text)
        if self._names.keys().isdisjoint(ids):
            return ids
        return [i for part in self._control_pattern.split(text) if part for i in self._encode_part(part)]

    def _encode_part(self, text: str) -> list[int]:
        ids = self._without_control(text)
        if self._names.keys().isdisjoint(ids):
            return ids
        return [token_id for character in text for token_id in self._without_control(character)]

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return match_any(self.control)


def _join_texts(runs: Iterable[Run]) -> list[Run]:
    """The runs with adjacent texts joined."""
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else 0
        if isinstance(run, str) and isinstance(last, str):
            out[-1] = last + run
        else:
            out.append(run)
    return out


class _Encoder:
    """The library's tokenizer with some of its added tokens, under the given names."""

    def __init__(self, spec: Mapping[str, Any], names: Mapping[int, str]) -> None:
        tokens = [token for token in spec.get("added_tokens", ()) if token["id"] in names]
        added = [{**token, "content": names[token["id"]]} for token in tokens]
        self._backend = _backend({**spec, **_NO_PROCESSING, "added_tokens": added})
        found = {self._backend.token_to_id(name): token_id for token_id, name in names.items()}
        self._ids = {theirs: ours for theirs, ours in found.items() if theirs != ours}
        """The ids of added tokens that the library renumbered."""

    def __call__(self, text: str) -> list[int]:
        """A long text is encoded as a batch: that is faster, and releases the GIL."""
        try:
            if len(text) < _LONG_TEXT:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            else:
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:  # not valid UTF-8
            raise UnsupportedContent("A text holds half of a character (a lone surrogate).") from None
        return [self._ids.get(token_id, token_id) for token_id in ids] if self._ids else ids


def _parse_definition(definition: str) -> dict[str, Any]:
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


def _contains_name(text: str) -> bool:
    return bool(text) and max(text) >= chr(_PRIVATE_NAMES.start)


def load_tokenizer(folder: Path) -> FastTokenizer:
    """The tokenizer of a model's folder. The transformers library converts older file formats."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return FastTokenizer(path.read_text(encoding="utf-8"))
    return FastTokenizer(_convert_tokenizer(folder))


def _convert_tokenizer(folder: Path) -> str:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        definition: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # the library raises many kinds
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenModel(f"The folder {str(folder)!r} holds no tokenizer that can be read ({why}).") from None
    return definition


class _Encoding(NamedTuple):
    ids: array[int]
    size: int


class EncodingCache:
    """An LRU cache of encoded texts. Thread-safe."""

    def __init__(self, encode: Callable[[str], Sequence[int]], capacity: int = MAX_CACHED_CHARACTERS) -> None:
        self._encode = encode
        self._entries: LRUCache[str, _Encoding] = LRUCache(capacity, getsizeof=lambda entry: entry.size)
        self._lock = threading.Lock()

    def __call__(self, text: str) -> Sequence[int]:
        with self._lock:
            found = self._entries.get(text)
        if found is not None:
            return found.ids
        encoding = _Encoding(array("I", self._encode(text)), len(text) + ENTRY_OVERHEAD)
        with self._lock:
            if encoding.size <= self._entries.maxsize:
                self._entries[text] = encoding
        return encoding.ids

    @property
    def size(self) -> int:
        """The size of the cache in characters, with the overhead of its entries."""
        return int(self._entries.currsize)


def encodes_runs_independently(spec: Mapping[str, Any]) -> bool:
    """Whether the ids of a text do not depend on the control tokens around it, by the tokenizer's definition.

    They do if the tokenizer puts a space before the first word, or strips spaces around control tokens."""
    normalizers = all(
        part.get("type") in _INDEPENDENT_NORMALIZERS for part in _steps(spec.get("normalizer"), "normalizers")
    )
    splitters = all(map(_splits_independently, _steps(spec.get("pre_tokenizer"), "pretokenizers")))
    added = spec.get("added_tokens") or ()
    strict = not any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word"))
    return normalizers and splitters and strict


def _steps(step: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    if step is None:
        return ()
    if step.get("type") == "Sequence":
        return [inner for part in step[name] for inner in _steps(part, name)]
    return (step,)


def _splits_independently(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")  # optional in some definitions
    return kind in _INDEPENDENT_SPLITTERS or (kind == "ByteLevel" and not part.get("add_prefix_space", True))


def token_bytes(spec: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The bytes of each token id; empty for ids without a token."""
    pieces = _vocabulary_pieces(spec["model"])
    added = {token["id"]: token["content"].encode() for token in spec.get("added_tokens", ())}
    convert = _converter(spec.get("decoder") or {})
    size = max((*pieces.values(), *added), default=-1) + 1
    out = [b""] * size
    for piece, token_id in pieces.items():
        if not piece.startswith(HOLE):
            out[token_id] = convert(piece)
    for token_id, data in added.items():
        out[token_id] = data
    return tuple(out)


def _vocabulary_pieces(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram models list pieces with their scores
        return {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _converter(decoder: Mapping[str, Any]) -> Callable[[str], bytes]:
    kinds = list(_decoder_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in kinds):
        return _byte_level
    marks = [_replacement(step) for step in kinds if step["type"] in ("Metaspace", "Replace")]
    return lambda piece: _metaspace(piece, [mark for mark in marks if mark])


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


def _metaspace(piece: str, marks: list[tuple[str, str]]) -> bytes:
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
    """The printable characters that stand for bytes in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_table()
