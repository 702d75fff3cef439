"""A text as the words it is found by.

Letters are folded (case, accents, width). A script that writes without spaces is cut into single characters, and an
emoji is a word, so that a query of one Chinese character or half a Japanese word finds its place: a query is a
phrase of such words.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

MAX_WORD = 64
MAX_TERMS = 16

_ALONE = (
    "\u2600-\u27bf\u2e80-\u2fdf\u3005-\u3007\u3041-\u30ff\u3100-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\u1100-\u11ff\uf900-\ufaff\U0001f300-\U0001faff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
"""Scripts without spaces (Han, Kana, Hangul, Thai, Lao, Burmese, Khmer), and emoji."""
_INDIC = "\u0900-\u0963\u0966-\u0dff"
"""Letters with vowel signs, which are no letters by themselves but part of the word."""
_EACH = re.compile(f"[{_ALONE}]")
_WORD = re.compile(rf"(?:[^\W_]|[{_ALONE}{_INDIC}])+")
_ACCENTS = re.compile("[\u0300-\u036f]+")


@dataclass(frozen=True, slots=True)
class Term:
    """Words that must follow each other; `open`: the last may go on."""

    words: tuple[str, ...]
    open: bool


def folded(text: str) -> str:
    bare = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFC", bare).casefold()


def words(text: str) -> list[str]:
    plain = text.casefold() if text.isascii() else _EACH.sub(r" \g<0> ", folded(text))
    return [word[:MAX_WORD] for word in _WORD.findall(plain)]


def is_alone(word: str) -> bool:
    """Whether it is a character of a script without spaces."""
    return _EACH.fullmatch(word) is not None


def terms(query: str) -> tuple[Term, ...]:
    """What a person typed: every term must be found; one in "quotes" exactly, others as beginnings of words."""
    found = []
    for quoted, bare in re.findall(r'"([^"]*)"?|([^\s"]+)', query):
        parts = tuple(words(quoted or bare))
        if parts:
            found.append(Term(parts, open=not quoted and not _EACH.match(parts[-1])))
    return tuple(found[:MAX_TERMS])
