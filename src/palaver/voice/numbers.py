"""Numbers in English words."""

from __future__ import annotations

import re

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
