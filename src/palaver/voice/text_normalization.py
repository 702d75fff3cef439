"""A clause put into words: Markdown is dropped, numbers and symbols are read out."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen".split()
)
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_MONTHS = "January February March April May June July August September October November December".split()
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_CURRENCIES = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", "")}
_UNSAYABLE = 15
"""From so many digits on a number is read digit by digit."""

_DIGITS = r"\d+(?:,\d{3})+(?!\d)|\d+"
_DATE = re.compile(r"\b(\d{4})-(\d{2})-(\d{2})\b")
_TIME = re.compile(r"\b([01]?\d|2[0-3]):([0-5]\d)(?!\d|:)")
_MONEY = re.compile(
    rf"([$€£¥])\s?({_DIGITS})(?:\.(\d{{2}}))?(?!\d|\.\d)(?:\s(hundred|thousand|million|billion|trillion)\b)?"
)
_ORDINAL = re.compile(r"\b(\d+)(st|nd|rd|th)\b")
_RANGE = re.compile(r"(?<![\w.-])(\d+(?:\.\d+)?)\s?[-–]\s?(\d+(?:\.\d+)?)(?![\w-]|\.\d)")
_NUMBER = re.compile(rf"(?<![\w.])([-−+](?=\d))?({_DIGITS})((?:\.\d+)*)")
_INSIDE = re.compile(r"\d+")


def cardinal(number: int) -> str:
    if number < 0:
        return f"minus {cardinal(-number)}"
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[ones]}" if ones else "")
    size, name = next((size, name) for size, name in _SCALES if number >= size)
    count, rest = divmod(number, size)
    tail = "" if not rest else f" and {cardinal(rest)}" if number < 1000 else f" {cardinal(rest)}"
    return f"{cardinal(count)} {name}{tail}"


def ordinal(number: int) -> str:
    head, dash, last = cardinal(number).rpartition("-")
    if not dash:
        head, dash, last = cardinal(number).rpartition(" ")
    ending = _ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return f"{head}{dash}{ending}"


def year(number: int) -> str:
    high, low = divmod(number, 100)
    if not 1100 <= number < 2100 or number // 10 == 200 or not low:
        return cardinal(number) if low or number < 1100 or number == 2000 else f"{cardinal(high)} hundred"
    return f"{cardinal(high)} {cardinal(low) if low > 9 else f'oh {cardinal(low)}'}"


def in_words(text: str) -> str:
    """The text with every number put into words; dates, times, money, ordinals and ranges as they are read."""
    for pattern, read in _READERS:
        text = pattern.sub(read, text)
    return text


def _said(digits: str) -> str:
    plain = digits.replace(",", "")
    if len(plain) >= _UNSAYABLE or (len(plain) > 1 and plain.startswith("0")):
        return one_by_one(plain)
    return cardinal(int(plain))


def one_by_one(digits: str) -> str:
    return " ".join(_SMALL[int(digit)] for digit in digits)


def _date(found: re.Match[str]) -> str:
    month, day = int(found[2]), int(found[3])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return found[0]
    return f"{_MONTHS[month - 1]} {ordinal(day)}, {year(int(found[1]))}"


def _time(found: re.Match[str]) -> str:
    hours, minutes = int(found[1]), int(found[2])
    if not minutes:
        return f"{cardinal(hours)} o'clock" if hours < 13 else f"{cardinal(hours)} hundred"
    return f"{cardinal(hours)} {f'oh {cardinal(minutes)}' if minutes < 10 else cardinal(minutes)}"


def _money(found: re.Match[str]) -> str:
    whole, part = _CURRENCIES[found[1]]
    count = int(found[2].replace(",", ""))
    if found[4]:
        number = f"{found[2]}.{found[3]}" if found[3] else found[2]
        return f"{number} {found[4]} {_plural(whole, 2)}"
    said = f"{_said(found[2])} {_plural(whole, count)}"
    cents = int(found[3] or 0)
    return f"{said} and {cardinal(cents)} {_plural(part, cents)}" if cents and part else said


def _plural(word: str, count: int) -> str:
    if count == 1 or word == "yen":
        return word
    return "pence" if word == "penny" else f"{word}s"


def _ordinal(found: re.Match[str]) -> str:
    return ordinal(int(found[1])) if len(found[1]) < _UNSAYABLE else found[0]


def _number(found: re.Match[str]) -> str:
    sign = {"-": "minus ", "−": "minus ", "+": "plus "}.get(found[1] or "", "")
    parts = found[3].split(".")[1:]
    if len(parts) == 1:
        return f"{sign}{_said(found[2])} point {one_by_one(parts[0])}"
    return sign + " point ".join([_said(found[2]), *map(_said, parts)])


_READERS = (
    (_DATE, _date),
    (_TIME, _time),
    (_MONEY, _money),
    (_ORDINAL, _ordinal),
    (_RANGE, lambda found: f"{found[1]} to {found[2]}"),
    (_NUMBER, _number),
    (_INSIDE, lambda found: f" {_said(found[0])} "),
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


def spoken_words(text: str, language: str = "en", begins_line: bool = True) -> str:
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
