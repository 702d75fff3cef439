"""Which characters are unfit for speech: an answer that is read aloud holds none of them."""

from __future__ import annotations

import unicodedata
from functools import cache

_MARKS = frozenset('*#`~_^|\\/<>=&@()[]{}"')
_OTHERS = frozenset("“”„‟‘‚‛«»‹›「」『』〝〞〟〈〉《》【】〔〕〖〗〘〙〚〛•‣◦▪▫●○■□◆◇★☆※")
"""Marks without a plain form. The apostrophe is none of them."""
_WIDE_FORMS = (range(0x80, 0x10000), range(0x1F100, 0x1F200))


@cache
def unfit_characters() -> frozenset[str]:
    """Marks of Markdown and of code, brackets and quotation marks, in all their forms: full-width, small, enclosed."""
    return _MARKS | _OTHERS | {chr(code) for codes in _WIDE_FORMS for code in codes if _is_a_form(chr(code))}


def _is_a_form(character: str) -> bool:
    return not _MARKS.isdisjoint(unicodedata.normalize("NFKC", character))
