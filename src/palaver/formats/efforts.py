"""Words for how hard a model is to think, from nothing to as hard as it can: ordinary English, put in an order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CONVENTIONAL = ("low", "medium", "high")
"""What is offered where a template writes the word as it is given and shows no other."""

_SCALE = (
    "none off no never disabled disable no_think nothink no_thinking zero without silent quiet",
    "minimal min minimum tiny least lowest",
    "low light lite brief briefly short shallow quick fast small little",
    "medium mid normal moderate standard balanced middle default regular",
    "high heavy deep long large thorough hard strong much",
    "max maximum xhigh extra_high very_high highest ultra most extreme",
)
_RANKS = {word: rank for rank, words in enumerate(_SCALE) for word in words.split()}
_AUTOMATIC = {"auto", "automatic", "adaptive", "dynamic"}
_SWITCHES = {*_SCALE[0].split(), *_AUTOMATIC, "on", "yes", "enabled", "enable", "true", "false"}


def rank(word: Any) -> int | None:
    """Where a word stands from nothing (0) up; None for one that is not of the scale."""
    return _RANKS.get(str(word).casefold().replace("-", "_").replace(" ", "_"))


def is_off(word: Any) -> bool:
    return rank(word) == 0


def is_automatic(word: Any) -> bool:
    """Whether the word leaves it to the model."""
    return str(word).casefold() in _AUTOMATIC


def only_switches(words: Iterable[Any]) -> bool:
    """Whether the words say on, off or automatic, and nothing about how much."""
    return all(str(word).casefold() in _SWITCHES for word in words)


def ordered(words: Iterable[Any]) -> tuple[Any, ...]:
    """Weakest first, where all have a place; else as they came."""
    given = list(words)
    if all(isinstance(word, int) for word in given):
        return tuple(sorted(given))
    if any(rank(word) is None for word in given):
        return tuple(given)
    return tuple(sorted(given, key=lambda word: rank(word) or 0))


def found(asked: str, words: Iterable[Any]) -> Any:
    """The word that was asked for: by its letters, or as the only one of the same strength; else None."""
    given = list(words)
    same = [word for word in given if str(word).casefold() == asked.casefold()]
    place = rank(asked)
    alike = [word for word in given if place is not None and rank(word) == place]
    return same[0] if same else alike[0] if len(alike) == 1 else None
