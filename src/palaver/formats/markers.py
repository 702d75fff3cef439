"""Markers: the text that a template writes around contents, split into control tokens, tags and plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable

CONTROL_LIKE = re.compile(r"<[^<>\s]*>|\[/?[A-Z][A-Z_]+\]")
"""Text that looks like a control token: in angle brackets, or capitals in square brackets."""
_SPECIAL_LOOKING = re.compile(r"[|｜]|^\[")
_SIDES = (("start", "end"), ("begin", "end"), ("open", "close"))
"""Words that make the name of a closing marker from that of its opening marker."""


def split_marker(marker: str, control: Iterable[str] = ()) -> tuple[str, ...]:
    """The parts of a marker in order, without white space: control tokens, tags and words."""
    escaped = sorted((re.escape(text) for text in control if text.strip()), key=len, reverse=True)
    pattern = re.compile("|".join([*escaped, CONTROL_LIKE.pattern]))
    out: list[str] = []
    at = 0
    for match in pattern.finditer(marker):
        out += [*marker[at : match.start()].split(), match[0]]
        at = match.end()
    return (*out, *marker[at:].split())


def match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, longest first."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def looks_special(marker: str) -> bool:
    """Whether the marker can't be meant as text, such as `<|im_end|>`."""
    return bool(_SPECIAL_LOOKING.search(marker))


def visible_text(text: str) -> str:
    """The words of a text on one line, without control strings."""
    words = (word for word in text.split() if not (CONTROL_LIKE.fullmatch(word) and looks_special(word)))
    return " ".join(words)


def common_start(first: str, second: str) -> str:
    """The common prefix, never cut inside something that looks like a control token."""
    size = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    size = min(len(first), len(second)) if size is None else size
    for text in (first, second):
        for match in CONTROL_LIKE.finditer(text):
            if match.start() < size < match.end():
                size = match.start()
    return first[:size]


def common_end(first: str, second: str) -> str:
    """The common suffix, never cut inside something that looks like a control token."""
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    for text in (first, second):
        cut = len(text) - size
        for match in CONTROL_LIKE.finditer(text):
            if match.start() < cut < match.end():
                size = len(text) - match.end()
                cut = match.end()
    return first[len(first) - size :]


def split_space(text: str) -> tuple[str, str, str]:
    """The leading white space, the text, the trailing white space."""
    core = text.strip()
    if not core:
        return text, "", ""
    at = text.index(core)
    return text[:at], core, text[at + len(core) :]


def are_paired(opener: str, closer: str) -> bool:
    """Whether two markers open and close the same block."""
    bare = re.sub(r"[^\w]", "", opener)
    other = re.sub(r"[^\w]", "", closer)
    return opener != closer and bool(bare) and (bare == other or other in (f"end{bare}", bare.replace("START", "END")))


def are_sides(opener: str, closer: str) -> bool:
    """Whether two markers are paired, or differ only in words such as start and end. So do parts of a header."""
    named = (opener.replace(side, other).replace(side.upper(), other.upper()) for side, other in _SIDES)
    return are_paired(opener, closer) or (opener != closer and closer in named)
