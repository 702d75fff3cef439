"""Which tokenizers read a text between two control tokens as if nothing stood around it, and what they made of the
texts they saw last: of a growing conversation only what is new is encoded."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


class Remembered:
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
