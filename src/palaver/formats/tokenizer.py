"""The tokenizer as formats see it: runs of text and control tokens to ids, ids to bytes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from palaver.errors import BrokenModel, UnsupportedContent
from palaver.formats.encoding import Remembered, reads_parts_alone
from palaver.formats.markers import any_of
from palaver.formats.vocabulary import token_bytes
from palaver.phases import Vocabulary

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
        self._remembered = Remembered(self._encode_safely) if reads_parts_alone(spec) else None

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
        return any_of(self.control)


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
