"""Where an answer may be cut while it streams: clauses, each as soon as it is whole.

Where the cuts fall depends on the text alone, never on the pieces in which it came.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 280
"""Characters after which a clause is cut where no punctuation does it."""
FIRST_PAUSE, LATER_PAUSE = 24, 80
"""Characters from which on a comma ends a clause: early in the first one, so that the sound begins soon."""

_CLOSERS = r"[\"'”’»)\]}*_~`」』）】》]*"
_CUT = re.compile(
    rf"(?P<line>\n)|(?P<full>[。！？｡]+)|(?P<sentence>[.!?…]+{_CLOSERS}(?=\s))"
    rf"|(?P<pause>[,;:—–]{_CLOSERS}(?=\s)|[，；：、])"
)
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,}|~{3,}|\$\$)")
_MAYBE_FENCE = re.compile(r" {0,3}(?:`{0,2}|~{0,2}|\$?)")
_NUMBERED = re.compile(r"\s*(?:>\s*)*\d{1,3}\.")
_INITIAL = re.compile(r"(?:^|[\s.(])(?!I)[A-ZÀ-Þ]\.$")
_WORD = re.compile(r"([^\W\d_]+(?:\.[^\W\d_]+)*)\.$")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st mt vs e.g i.e cf ca approx fig figs vol pp al gen col sgt capt lt rev hon "
    "jan feb mar apr jun jul aug sep sept oct nov dec inc ltd corp bros a.m p.m u.s u.k u.n d.c ph.d "
    "z.b d.h bzw usw".split()
)


@dataclass(frozen=True, slots=True)
class ClauseText:
    """A clause as the answer has it. All pieces joined are the answer."""

    text: str
    is_code: bool = False
    begins_line: bool = False


class ClauseSplitter:
    """For one answer: fed with its text as it comes."""

    def __init__(self) -> None:
        self._text = ""
        self._begins_line = True
        self._fence = ""
        """What closes the block of code that is open."""
        self._spoke = False

    def feed(self, text: str) -> list[ClauseText]:
        self._text += text
        return self._pieces(final=False)

    def close(self) -> list[ClauseText]:
        """What is left, now that no more text comes."""
        return self._pieces(final=True)

    def _pieces(self, final: bool) -> list[ClauseText]:
        found = []
        while self._text and (piece := self._next(final)) is not None:
            found.append(piece)
        return found

    def _next(self, final: bool) -> ClauseText | None:
        if self._fence:
            return self._code(final)
        if self._begins_line:
            if fence := _FENCE.match(self._text):
                return self._opening(fence["mark"], final)
            if _MAYBE_FENCE.fullmatch(self._text) and not final:
                return None
        end = self._end(final)
        return None if end is None else self._take(end)

    def _take(self, end: int, is_code: bool = False) -> ClauseText:
        piece = ClauseText(self._text[:end], is_code, self._begins_line)
        self._text = self._text[end:]
        self._begins_line = piece.text.endswith("\n")
        self._spoke = self._spoke or (not is_code and any(map(str.isalnum, piece.text)))
        return piece

    def _line(self, final: bool) -> int | None:
        """Where the line ends, or None where more of it may come."""
        at = self._text.find("\n")
        return at + 1 if at >= 0 else len(self._text) if final else None

    def _opening(self, mark: str, final: bool) -> ClauseText | None:
        end = self._line(final)
        if end is None:
            return None
        line = self._text[:end].strip()
        if not (mark == "$$" and line.count("$$") > 1):
            self._fence = mark
        return self._take(end, is_code=True)

    def _code(self, final: bool) -> ClauseText | None:
        end = self._line(final)
        if end is None:
            return None
        line = self._text[:end].strip()
        if line.endswith("$$") if self._fence == "$$" else _closes(line, self._fence):
            self._fence = ""
        return self._take(end, is_code=True)

    def _end(self, final: bool) -> int | None:
        for cut in _CUT.finditer(self._text, 0, LONGEST + 1):
            if cut.end() > LONGEST:
                break
            if self._ends(cut):
                return cut.end()
        if len(self._text) > LONGEST:
            return self._forced_end()
        return len(self._text) if final else None

    def _ends(self, cut: re.Match[str]) -> bool:
        if cut.lastgroup == "line":
            return True
        before = self._text[: cut.end()]
        if _is_inside_markup(before):
            return False
        if cut.lastgroup == "pause":
            return len(before.strip()) >= (LATER_PAUSE if self._spoke else FIRST_PAUSE)
        return cut.lastgroup == "full" or not self._is_abbreviated(before)

    def _is_abbreviated(self, before: str) -> bool:
        if not before.endswith("."):
            return False
        if self._begins_line and _NUMBERED.fullmatch(before):
            return True
        word = _WORD.search(before)
        return bool(_INITIAL.search(before)) or (word is not None and word[1].lower() in _ABBREVIATIONS)

    def _forced_end(self) -> int:
        at = max(self._text.rfind(" ", 1, LONGEST), self._text.rfind("\t", 1, LONGEST))
        return at + 1 if at > 0 else LONGEST


def _closes(line: str, mark: str) -> bool:
    """A fence is closed by as many of its marks or more, and nothing else."""
    return len(line) >= len(mark) and set(line) == {mark[0]}


def _is_inside_markup(text: str) -> bool:
    """Whether a link or a piece of code is still open at the end of the text."""
    if text.count("`") % 2:
        return True
    link = text.rfind("](")
    if link >= 0 and ")" not in text[link:]:
        return True
    return text.rfind("[") > text.rfind("]")
