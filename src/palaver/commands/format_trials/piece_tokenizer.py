"""A tokenizer for trials without a model: control strings are one token each, and any other text can be a token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from palaver.formats.markers import CONTROL_LIKE, looks_special, match_any
from palaver.formats.tokenizer import Run


class PieceTokenizer(Sequence[bytes]):
    """It is its own vocabulary, which grows with every new piece."""

    def __init__(self, control: Iterable[str] = ()) -> None:
        self._pieces: list[bytes] = []
        self._ids: dict[str, int] = {}
        self.control: Mapping[str, int] = {text: self.piece(text) for text in sorted(set(control))}
        self.special_ids = frozenset(i for text, i in self.control.items() if looks_special(text))
        self.fingerprint = "pieces"
        self.prefix: tuple[int, ...] = ()
        self._pattern = match_any(self.control) if self.control else None

    @property
    def vocabulary(self) -> Sequence[bytes]:
        return self

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | Sequence[bytes]:
        return self._pieces[place]

    def __len__(self) -> int:
        return len(self._pieces)

    def piece(self, text: str | bytes) -> int:
        """The id of a token with this text; it is added if it is new."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        key = data.decode("latin-1")
        if key not in self._ids:
            self._ids[key] = len(self._pieces)
            self._pieces.append(data)
        return self._ids[key]

    def encode(self, runs: Iterable[Run]) -> list[int]:
        return [i for run in runs for i in ([run] if isinstance(run, int) else map(self.piece, run))]

    def text(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def runs(self, text: str) -> Iterator[Run]:
        """The control tokens in the text, and the text between them."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if text[at : match.start()]:
                yield text[at : match.start()]
            yield self.control[match[0]]
            at = match.end()
        if text[at:]:
            yield text[at:]


def control_strings(source: str) -> set[str]:
    """Texts in a template's source that look like control tokens, without placeholders in examples."""
    return {tag for tag in CONTROL_LIKE.findall(source) if not re.search(r"[={}'\"\\,;()]", tag) and len(tag) > 2} | {
        '<|"|>'
    }.intersection(re.findall(r'<\|"\|>', source))
