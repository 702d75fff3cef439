"""A clause put into words: Markdown is dropped, numbers and symbols are read out."""

from __future__ import annotations

import re

from palaver.voice.numbers import in_words

_IMAGE_OR_LINK = re.compile(r"!?\[([^\]\n]*)\](?:\([^)\n]*\)|\[[^\]\n]*\])")
_ANGLE_LINK = re.compile(r"<((?:https?://|mailto:)[^>\s]+)>")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]*>")
_URL = re.compile(r"\bhttps?://(?:www\.)?([^\s/?#)\]>]+)[^\s)\]>]*|\bwww\.([^\s/?#)\]>]+)[^\s)\]>]*")
_ADDRESS = re.compile(r"\b([\w.+-]+)@([\w-]+(?:\.[\w-]+)+)\b")
_LINE_MARK = re.compile(r"^\s*(?:>\s?)*(?:#{1,6}\s+|[-*+•]\s+(?:\[[ xX]\]\s+)?)?")
_NUMBERED = re.compile(r"^(\d{1,3})[.)]\s+")
_RULE = re.compile(r"^[\s|:=*_-]*$")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3}|_{1,3}|~~)(?=\S)|(?<=\S)(\*{1,3}|_{1,3}|~~)(?!\w)")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_CELLS = re.compile(r"\s*\|\s*")
_SPACE = re.compile(r"\s+")
_LOOSE = re.compile(r" +(?=[,.;:!?)])")
_STRAY = re.compile(r"[*_`#~^|\\<>{}\[\]=@/+\x00-\x1f\x7f]+")
_PICTURES = re.compile(
    "[\U0001f000-\U0001faff\u2190-\u21ff\u2300-\u23ff\u2500-\u27bf\u2900-\u297f\u2b00-\u2bff\ufe0f\u200d\u20e3]+"
)

_BETWEEN = r"(?<=[\w)])\s*{}\s*(?=[\w(+−-])"
_SYMBOLS = tuple(
    (re.compile(pattern), f" {word} ")
    for pattern, word in (
        (r"<=|≤", "is at most"),
        (r">=|≥", "is at least"),
        (r"!=|≠", "is not"),
        (r"==|=", "equals"),
        (r"≈", "is about"),
        (r"->|=>|→|⇒", "to"),
        (r"(?<=\s)<(?=\s)", "is less than"),
        (r"(?<=\s)>(?=\s)", "is greater than"),
        (r"±", "plus or minus"),
        (_BETWEEN.format("[×·]") + r"|(?<=\d)\s*[x*]\s*(?=\d)|(?<=\w)\s+\*\s+(?=\w)", "times"),
        (r"÷", "divided by"),
        (r"(?<=\d)/(?=\d)", "over"),
        (r"(?<=\w)/(?=\w)", "slash"),
        (r"(?<=\w)\^(?=[\w(-])", "to the power of"),
        (r"²", "squared"),
        (r"³", "cubed"),
        (r"(?<=\s)[-−](?=\s\d)(?<=\d\s[-−])", "minus"),
        (r"\+(?!\d)|(?<=[\w)])\s*\+", "plus"),
        (r"&", "and"),
        (r"%", "percent"),
        (r"‰", "per mille"),
        (r"°\s?C\b", "degrees Celsius"),
        (r"°\s?F\b", "degrees Fahrenheit"),
        (r"°", "degrees"),
        (r"#(?=\d)", "number"),
        (r"~(?=\d)", "about"),
        (r"√", "the square root of"),
        (r"∞", "infinity"),
        (r"π", "pi"),
        (r"§", "section"),
        (r"©", "copyright"),
        (r"(?<=\w)@(?=\w)|(?<=\s)@(?=\s)", "at"),
        (r"\\(?=\w)", "backslash"),
    )
)


def words(text: str, language: str = "en", begins_line: bool = True) -> str:
    """What is said for a clause; empty where there is nothing to say.

    Outside of English numbers and symbols are left to the speaker, whose voice knows them in its own language.
    """
    text = _without_marks(text, begins_line)
    if language.partition("-")[0] == "en":
        text = in_words(_symbols(text))
    text = _STRAY.sub(" ", text)
    text = _SPACE.sub(" ", text).strip()
    text = _LOOSE.sub("", text)
    return text if any(map(str.isalnum, text)) else ""


def _without_marks(text: str, begins_line: bool) -> str:
    """The text that Markdown would show, a link by its text."""
    if _RULE.match(text):
        return ""
    if begins_line:
        text = _LINE_MARK.sub("", text)
        text = _NUMBERED.sub(r"\1, ", text)
    text = _IMAGE_OR_LINK.sub(r"\1", text)
    text = _ANGLE_LINK.sub(r"\1", text)
    text = _TAG.sub(" ", text)
    text = _URL.sub(lambda found: _dotted(found[1] or found[2]), text)
    text = _ADDRESS.sub(lambda found: f"{_dotted(found[1])} at {_dotted(found[2])}", text)
    text = _EMPHASIS.sub("", text.replace("`", ""))
    text = _ESCAPED.sub(r"\1", text)
    if text.count("|") > 1:
        text = _CELLS.sub(", ", text.strip().strip("|").strip())
    return _PICTURES.sub(lambda found: found[0] if found[0] in "→⇒" else " ", text)


def _dotted(name: str) -> str:
    return name.rstrip(".,;:!?").replace(".", " dot ").replace("_", " ").replace("-", " ")


def _symbols(text: str) -> str:
    for pattern, word in _SYMBOLS:
        text = pattern.sub(word, text)
    return text
