"""The words for how hard a model thinks, from "none" to "maximum", and which of them mean the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CONVENTIONAL_EFFORTS = ("low", "medium", "high")
"""Efforts that are offered if a template writes the word as it is given and names no values."""

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
_SWITCH_WORDS = {*_SCALE[0].split(), *_AUTOMATIC, "on", "yes", "enabled", "enable", "true", "false"}


def effort_rank(word: Any) -> int | None:
    """The rank of an effort, from none (0) up; None for an unknown word."""
    return _RANKS.get(str(word).casefold().replace("-", "_").replace(" ", "_"))


def is_effort_off(word: Any) -> bool:
    return effort_rank(word) == 0


def is_effort_automatic(word: Any) -> bool:
    """Whether the word leaves the effort to the model."""
    return str(word).casefold() in _AUTOMATIC


def are_only_switches(words: Iterable[Any]) -> bool:
    """Whether the words mean on, off or automatic only, and no effort."""
    return all(str(word).casefold() in _SWITCH_WORDS for word in words)


def order_efforts(words: Iterable[Any]) -> tuple[Any, ...]:
    """Weakest first, if all words have a rank; else in the given order."""
    given = list(words)
    if all(isinstance(word, int) for word in given):
        return tuple(sorted(given))
    if any(effort_rank(word) is None for word in given):
        return tuple(given)
    return tuple(sorted(given, key=lambda word: effort_rank(word) or 0))


def match_effort(effort: str, words: Iterable[Any]) -> Any:
    """The word for this effort: the same word, or the only one of the same rank; else None."""
    given = list(words)
    equal = [word for word in given if str(word).casefold() == effort.casefold()]
    rank = effort_rank(effort)
    same_rank = [word for word in given if rank is not None and effort_rank(word) == rank]
    return equal[0] if equal else same_rank[0] if len(same_rank) == 1 else None
