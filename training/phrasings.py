"""Ways to ask. Every fifth phrasing of every bank is kept from training and used by the evaluation alone.

Phrasings that differ only in case, spaces, punctuation or the names of their slots are one phrasing, in whatever bank
they stand, and go to the same half.

A form is a sentence with `{slots}` and `(one|other)` choices: "(What is|What's) {a} + {b}?". One that begins with ~ is
for training alone and is not counted: these give breadth to the words of a bank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import TypeVar

HELD_OUT_EVERY = 5
BROAD = "~"
ASKS = Path(__file__).parent / "asks"
T = TypeVar("T")


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held out"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a form: the slot to fill, or the texts to choose from."""

    slot: str
    choices: tuple[str, ...] = ()


@cache
def parts(form: str) -> tuple[Part, ...]:
    found = re.findall(r"\{(\w+)\}|\(([^()]*)\)|([^{}()]+)", form)
    return tuple(Part(slot, tuple(choices.split("|")) if choices else (text,)) for slot, choices, text in found)


@cache
def banks(file: str) -> dict[str, tuple[str, ...]]:
    """The phrasings of one ability by the name of their bank: a `[name]` line, then one phrasing a line."""
    sections = re.split(r"^\[(\w+)\]\n", (ASKS / f"{file}.txt").read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: tuple(filter(None, body.split("\n"))) for name, body in zip(sections[::2], sections[1::2], strict=True)
    }


@cache
def share(bank: str, split: Split) -> tuple[tuple[str, ...], ...]:
    """The phrasings of the bank "file/name" that belong to the split, each with its choices spelt out."""
    file, name = bank.split("/")
    mine = (tuple(text for text in spelt(form) if halves()[bank, text] is split) for form in banks(file)[name])
    return tuple(filter(None, mine))


@cache
def halves() -> dict[tuple[str, str], Split]:
    """The half of every phrasing of every bank."""
    known: dict[str, Split] = {}
    found: dict[tuple[str, str], Split] = {}
    for file in sorted(path.stem for path in ASKS.glob("*.txt")):
        for name, forms in banks(file).items():
            for at, form in enumerate(form for form in forms if form[0] != BROAD):
                half = Split.HELD_OUT if at % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else Split.TRAIN
                found |= {(f"{file}/{name}", text): known.setdefault(essence(text), half) for text in spelt(form)}
    for bank, form in _all_broad():
        found |= {(bank, text): known.get(essence(text), Split.TRAIN) for text in spelt(form)}
    return found


def _all_broad() -> Iterator[tuple[str, str]]:
    for file in sorted(path.stem for path in ASKS.glob("*.txt")):
        for name, forms in banks(file).items():
            yield from ((f"{file}/{name}", form) for form in forms if form[0] == BROAD)


def spelt(form: str) -> list[str]:
    """Every text that the choices of a form allow."""
    pieces = ((f"{{{part.slot}}}",) if part.slot else part.choices for part in parts(form.removeprefix(BROAD)))
    return ["".join(chosen) for chosen in product(*pieces)]


def essence(text: str) -> str:
    """The phrasing without what does not make it another one."""
    return re.sub(r"[^\w{}+*/×÷=%−-]", "", re.sub(r"\{\w+\}", "{}", text).lower()) or text


OPENERS = "phrasings/openers"
CLOSERS = "phrasings/closers"


@dataclass(frozen=True, slots=True)
class Draw:
    """The source of all choices in a conversation: a random generator and the half of the phrasings it may use."""

    random: Random
    split: Split = Split.TRAIN
    pieces: tuple[str, ...] = ()
    terminal: bool = False
    """Whether the prompt of this conversation says that the user is at a terminal."""

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random.random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        return self.random.sample(options, count)

    def between(self, low: int, high: int) -> int:
        return low + int(self.random.random() * (high - low + 1))

    def form(self, bank: str) -> str:
        return self.pick(self.pick(share(bank, self.split)))

    def fill(self, form: str, slots: dict[str, object], lower: bool = False) -> str:
        texts = []
        for part in parts(form):
            if part.slot:
                texts.append(str(slots[part.slot]))
            else:
                text = self.pick(part.choices)
                texts.append(text.lower() if lower else text)
        return "".join(texts)

    def say(self, *forms: str, **slots: object) -> str:
        """A sentence of the model's own: no wrapping, no held-out half."""
        return self.fill(self.pick(forms), slots)

    def plain(self, bank: str, **slots: object) -> str:
        """A phrasing of this draw's half, as written."""
        return self.fill(self.form(bank), slots)

    def ask(self, bank: str, **slots: object) -> str:
        """A phrasing of this draw's half as people type it: wrapped, lower case, without its full stop, misspelt."""
        return self.phrase(self.form(bank), **slots)

    def phrase(self, form: str, **slots: object) -> str:
        """A form as people type it."""
        lower = self.chance(0.15)
        text = self.fill(self._misspelt(form) if self.chance(0.04) else form, slots, lower)
        opener = self.form(OPENERS) if self.chance(0.16) else ""
        if opener:
            text = _after_opener(text, form, opener)
        if text[-1] in ".?" and self.chance(0.2):
            return text[:-1]
        return text + (self.form(CLOSERS) if text[-1] in ".?!" and self.chance(0.1) else "")

    def typed(self, name: str) -> str:
        """A name as people type it: sometimes without its capital."""
        return name.lower() if self.chance(0.3) else name

    def _misspelt(self, form: str) -> str:
        """The form with two neighbouring letters of an ordinary word swapped."""
        words = list(re.finditer(r"(?<![{(|\w])[a-z]{4,}(?![})|\w])", form))
        if not words:
            return form
        at = self.random.randrange((word := self.pick(words)).start() + 1, word.end() - 1)
        return form[:at] + form[at + 1] + form[at] + form[at + 2 :]


def _after_opener(text: str, form: str, opener: str) -> str:
    keeps = form[0] in "{" or re.match(r"I\b|I'", text) or text[:2].isupper() or not opener.endswith((", ", ": "))
    return opener + (text if keeps else text[0].lower() + text[1:])
