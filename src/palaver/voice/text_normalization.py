"""Text normalization for speech: strips Markdown, spells out numbers and symbols, detects the language by script."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

_DIGIT_WORDS = "zero one two three four five six seven eight nine".split()
_MONTHS = "January February March April May June July August September October November December".split()
_CURRENCIES = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", "")}
_FACTORS = {"k": "thousand", "M": "million", "B": "billion"}
_MAX_DIGITS = 15
"""Numbers of this many digits or more are read digit by digit."""

_DIGITS = r"\d+(?:,\d{3})+(?!\d)|\d+"
_DATE = re.compile(r"\b(\d{4})-(\d{2})-(\d{2})\b")
_TIME = re.compile(r"\b([01]?\d|2[0-3]):([0-5]\d)(?!\d|:)")
_MONEY = re.compile(
    rf"([$€£¥])\s?({_DIGITS})(?:\.(\d+))?(?!\d|\.\d)(?:\s(hundred|thousand|million|billion|trillion)\b)?"
)
_MONEY_RANGE = re.compile(rf"([$€£¥])\s?((?:{_DIGITS})(?:\.\d+)?)\s?[-–]\s?\1?(?=\d)")
_JOINED_MONEY = re.compile(r"(?<=\w)(?=[$€£¥]\s?\d)")
"""As in US$5."""
_ORDINAL = re.compile(rf"\b({_DIGITS})(st|nd|rd|th)\b")
_DECADE = re.compile(r"(?<![\w.,])(1[1-9]\d0|2\d\d0)['’]?s\b")
_EXPONENT = re.compile(rf"(?<![\w.])(?<!\w-)((?:{_DIGITS})(?:\.\d+)?)[eE]\+?([-−]?\d{{1,3}})(?![\w-]|\.\d)")
_FACTOR = re.compile(rf"(?<![\w.])((?:{_DIGITS})(?:\.\d+)?)([kMB])\b")
_RANGE = re.compile(r"(?<![\w.-])(\d+(?:\.\d+)?)\s?[-–]\s?(\d+(?:\.\d+)?)(?![\w-]|\.\d)")
_NUMBER = re.compile(rf"(?<![\w.])([-−+](?=\d))?({_DIGITS})((?:\.\d+)*)")
_EMBEDDED_NUMBER = re.compile(r"\d+")


@lru_cache(4096)
def _number_words(number: int, kind: str = "cardinal") -> str:
    """The number as a "cardinal", an "ordinal" or a "year", in English."""
    from num2words import num2words  # imports all of its languages

    return str(num2words(number, to=kind)).replace(",", "")


def spell_numbers(text: str) -> str:
    """Spells out every number; dates, times, money, decades, ordinals, exponents and ranges as they are read aloud."""
    for pattern, read in _NUMBER_RULES:
        text = pattern.sub(read, text)
    return text


def _spell_integer(digits: str) -> str:
    plain = digits.replace(",", "")
    if len(plain) >= _MAX_DIGITS or (len(plain) > 1 and plain.startswith("0")):
        return spell_digits(plain)
    return _number_words(int(plain))


def spell_digits(digits: str) -> str:
    return " ".join(_DIGIT_WORDS[int(digit)] for digit in digits)


def _spell_date(found: re.Match[str]) -> str:
    month, day = int(found[2]), int(found[3])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return found[0]
    return f"{_MONTHS[month - 1]} {_number_words(day, 'ordinal')}, {_number_words(int(found[1]), 'year')}"


def _spell_time(found: re.Match[str]) -> str:
    hours, minutes = int(found[1]), int(found[2])
    if not minutes:
        return f"{_number_words(hours)} o'clock" if hours < 13 else f"{_number_words(hours)} hundred"
    return f"{_number_words(hours)} {f'oh {_number_words(minutes)}' if minutes < 10 else _number_words(minutes)}"


def _spell_money(found: re.Match[str]) -> str:
    whole, part = _CURRENCIES[found[1]]
    count = int(found[2].replace(",", ""))
    if found[4] or len(found[3] or "00") != 2:  # a number of dollars, and not dollars and cents
        number = f"{found[2]}.{found[3]}" if found[3] else found[2]
        return " ".join(filter(None, (number, found[4], _plural(whole, 2))))
    words = f"{_spell_integer(found[2])} {_plural(whole, count)}"
    cents = int(found[3] or 0)
    return f"{words} and {_number_words(cents)} {_plural(part, cents)}" if cents and part else words


def _plural(word: str, count: int) -> str:
    if count == 1 or word == "yen":
        return word
    return "pence" if word == "penny" else f"{word}s"


def _spell_ordinal(found: re.Match[str]) -> str:
    digits = found[1].replace(",", "")
    return _number_words(int(digits), "ordinal") if len(digits) < _MAX_DIGITS else found[0]


def _spell_decade(found: re.Match[str]) -> str:
    words = _number_words(int(found[1]), "year")
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


def _spell_number(found: re.Match[str]) -> str:
    sign = {"-": "minus ", "−": "minus ", "+": "plus "}.get(found[1] or "", "")
    parts = found[3].split(".")[1:]
    if len(parts) == 1:
        return f"{sign}{_spell_integer(found[2])} point {spell_digits(parts[0])}"
    return sign + " point ".join([_spell_integer(found[2]), *map(_spell_integer, parts)])


_NUMBER_RULES = (
    (_DATE, _spell_date),
    (_TIME, _spell_time),
    (_EXPONENT, lambda found: f"{found[1]} times 10 to the {found[2]}"),
    (_FACTOR, lambda found: f"{found[1]} {_FACTORS[found[2]]}"),
    (_MONEY_RANGE, lambda found: f"{found[2]} to {found[1]}"),
    (_JOINED_MONEY, lambda _: " "),
    (_MONEY, _spell_money),
    (_DECADE, _spell_decade),
    (_ORDINAL, _spell_ordinal),
    (_RANGE, lambda found: f"{found[1]} to {found[2]}"),
    (_NUMBER, _spell_number),
    (_EMBEDDED_NUMBER, lambda found: f" {_spell_integer(found[0])} "),
)

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
_SPACE_BEFORE_PUNCTUATION = re.compile(r" +(?=[,.;:!?)])")
_UNSPEAKABLE = re.compile(r"[*_`#~^|\\<>{}\[\]=@/+\x00-\x1f\x7f]+")
_EMOJI = re.compile(
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
        (r"\+(?!\d)|(?<=[\w)])(?<!\d[eE])\s*\+", "plus"),
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


def normalize_text(text: str, language: str = "en", begins_line: bool = True) -> str:
    """The words to speak for a clause; empty if there are none.

    In other languages than English, numbers and symbols are left to the speaker.
    """
    text = _strip_markdown(text, begins_line)
    if language.partition("-")[0] == "en":
        text = spell_numbers(_spell_symbols(text))
    text = _UNSPEAKABLE.sub(" ", text)
    text = _SPACE.sub(" ", text).strip()
    text = _SPACE_BEFORE_PUNCTUATION.sub("", text)
    return text if any(map(str.isalnum, text)) else ""


def _strip_markdown(text: str, begins_line: bool) -> str:
    """The text that Markdown would render; a link is its text."""
    if _RULE.match(text):
        return ""
    if begins_line:
        text = _LINE_MARK.sub("", text)
        text = _NUMBERED.sub(r"\1, ", text)
    text = _IMAGE_OR_LINK.sub(r"\1", text)
    text = _ANGLE_LINK.sub(r"\1", text)
    text = _TAG.sub(" ", text)
    text = _URL.sub(lambda found: _spell_domain(found[1] or found[2]), text)
    text = _ADDRESS.sub(lambda found: f"{_spell_domain(found[1])} at {_spell_domain(found[2])}", text)
    text = _EMPHASIS.sub("", text.replace("`", ""))
    text = _ESCAPED.sub(r"\1", text)
    if text.count("|") > 1:
        text = _CELLS.sub(", ", text.strip().strip("|").strip())
    return _EMOJI.sub(lambda found: found[0] if found[0] in "→⇒" else " ", text)


def _spell_domain(name: str) -> str:
    return name.rstrip(".,;:!?").replace(".", " dot ").replace("_", " ").replace("-", " ")


def _spell_symbols(text: str) -> str:
    for pattern, word in _SYMBOLS:
        text = pattern.sub(word, text)
    return text


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
_SAME_SCRIPT = {
    "ru": ("uk", "bg", "sr", "mk", "be", "kk"),
    "ar": ("fa", "ur"),
    "cmn": ("ja", "yue", "zh", "hak"),
    "hi": ("mr", "ne"),
}
"""Languages that share a script: a voice of one of them can read it."""


def detect_language(text: str, default_language: str) -> str:
    """The language of the most frequent script; the default where its voice can read that script."""
    scripts = Counter(_script(character) for character in text if character.isalpha())
    if not scripts:
        return default_language
    if scripts["ja"]:
        scripts["ja"] += scripts.pop("cmn", 0)
    found = scripts.most_common(1)[0][0]
    if not found or default_language.partition("-")[0] in (found, *_SAME_SCRIPT.get(found, ())):
        return default_language
    return found


@lru_cache(4096)
def _script(character: str) -> str:
    code = ord(character)
    return next((language for first, last, language in _SCRIPTS if first <= code <= last), "")
