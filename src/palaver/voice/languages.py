"""Which language a clause is in, as far as its letters tell."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

_SCRIPTS = (
    (0x0370, 0x03FF, "el"),
    (0x0400, 0x04FF, "ru"),
    (0x0530, 0x058F, "hy"),
    (0x0590, 0x05FF, "he"),
    (0x0600, 0x06FF, "ar"),
    (0x0900, 0x097F, "hi"),
    (0x0980, 0x09FF, "bn"),
    (0x0B80, 0x0BFF, "ta"),
    (0x0E00, 0x0E7F, "th"),
    (0x10A0, 0x10FF, "ka"),
    (0x3040, 0x30FF, "ja"),
    (0x3400, 0x9FFF, "cmn"),
    (0xAC00, 0xD7AF, "ko"),
)
_SHARED = {
    "ru": ("uk", "bg", "sr", "mk", "be", "kk"),
    "ar": ("fa", "ur"),
    "cmn": ("ja", "yue", "zh", "hak"),
    "hi": ("mr", "ne"),
}
"""Languages that write with the same letters: a voice of one of them is kept."""


def language_of(text: str, own: str) -> str:
    """The language whose script most letters are of; the voice's own where it can read them."""
    scripts = Counter(_script(character) for character in text if character.isalpha())
    if not scripts:
        return own
    if scripts["ja"]:
        scripts["ja"] += scripts.pop("cmn", 0)
    found = scripts.most_common(1)[0][0]
    if not found or own.partition("-")[0] in (found, *_SHARED.get(found, ())):
        return own
    return found


@lru_cache(4096)
def _script(character: str) -> str:
    code = ord(character)
    return next((language for first, last, language in _SCRIPTS if first <= code <= last), "")
