"""Turns that build on the one before: "add 5 to that", "and backwards?", "double it"."""

from __future__ import annotations

from training import digits
from training.abilities import arithmetic, letters
from training.conversations import Exchange, Expect
from training.digits import spaced
from training.phrasings import Draw, Split
from training.words import word

ASK_ADD = "follow_ups/add"
ASK_TAKE = "follow_ups/take"
ASK_TIMES = "follow_ups/times"
ASK_DOUBLE = "follow_ups/double"
ASK_BACK = "follow_ups/back"
ASK_CAPITALS = "follow_ups/capitals"
ASK_LETTERS = "follow_ups/letters"
TAKES = {"add": ASK_ADD, "subtract": ASK_TAKE, "multiply": ASK_TIMES, "double": ASK_DOUBLE}


def numbers(draw: Draw, steps: int) -> list[Exchange]:
    """A sum, then steps that each go on from the last result."""
    start = arithmetic.sum_(draw, 3) if draw.chance(0.6) else arithmetic.difference(draw, 3)
    turns, value = [start], int(start.expect.value) if start.expect else 0
    for _ in range(steps):
        turn, value = _next(draw, value)
        turns.append(turn)
    return turns


def _next(draw: Draw, value: int) -> tuple[Exchange, int]:
    kinds = ("add", "add", "subtract", "multiply", "double") if 0 <= value < 1000 else ("add", "subtract")
    kind = draw.pick(kinds) if value >= 0 else "add"
    if kind in ("multiply", "double"):
        n = draw.between(2, 9) if kind == "multiply" else 2
    else:
        n = arithmetic.operand(draw, 2)
        while draw.split is Split.TRAIN and arithmetic.held_out(abs(value), n):
            n = arithmetic.operand(draw, 2)
    if kind == "add" and value < 0:
        return _from_negative(draw, value, n)
    if kind == "subtract":
        thought, result = digits.subtract(value, n)
    elif kind == "add":
        thought, result = digits.add(value, n)
    else:
        thought, result = digits.multiply(value, n)
    return _step(draw, kind, value, n, thought, result), result


def _from_negative(draw: Draw, value: int, n: int) -> tuple[Exchange, int]:
    thought, result = digits.subtract(n, -value)
    return _step(draw, "add", value, n, f"{value}+{n} is {n}-{-value}.\n{thought}", result), result


def _step(draw: Draw, kind: str, value: int, n: int, thought: str, result: int) -> Exchange:
    sign = {"add": "+", "subtract": "-"}.get(kind, "×")
    answer = draw.say("{v} {s} {n} = {r}.", "That's {r}.", "{r}.", v=value, s=sign, n=n, r=result)
    return Exchange(draw.ask(TAKES[kind], n=n), f"That was {value}.\n{thought}", answer, Expect("chains over turns", "last_number", str(result)))


def words(draw: Draw) -> list[Exchange]:
    """Something about a word, then something more about the same word."""
    w = word(draw)
    start = draw.pick((_spelt, _capitals, _counted))(draw, w)
    follow = draw.pick((_back_again, _capitals_again, _letters_again))(draw, w)
    return [start, follow]


def _spelt(draw: Draw, w: str) -> Exchange:
    return Exchange(draw.ask(letters.ASK_SPELL, w=letters.quoted(draw, w)), f"The letters of {w}: {spaced(w)}", spaced(w))


def _capitals(draw: Draw, w: str) -> Exchange:
    return Exchange(draw.ask(letters.ASK_UPPER, w=letters.quoted(draw, w)), f"Letters of {w}: {spaced(w)}\nCapitals: {spaced(w.upper())}", w.upper())


def _counted(draw: Draw, w: str) -> Exchange:
    return Exchange(draw.ask(letters.ASK_LENGTH, w=letters.quoted(draw, w)), "", f"{w} has {len(w)} letters.")


def _back_again(draw: Draw, w: str) -> Exchange:
    back = w[::-1]
    thought = f"Reverse {w}: {spaced(w)}\nBackwards: {spaced(back)}\nTogether: {back}"
    return Exchange(draw.ask(ASK_BACK), thought, f"Backwards it is {back}.", Expect("chains over turns", "has_word", back))


def _capitals_again(draw: Draw, w: str) -> Exchange:
    thought = f"Letters of {w}: {spaced(w)}\nCapitals: {spaced(w.upper())}"
    return Exchange(draw.ask(ASK_CAPITALS), thought, w.upper(), Expect("chains over turns", "has_word", w.upper()))


def _letters_again(draw: Draw, w: str) -> Exchange:
    steps = ", ".join(f"{x} {at}" for at, x in enumerate(w, 1))
    thought = f"The word is {w}.\nLetters of {w}: {steps}. So {len(w)}."
    return Exchange(draw.ask(ASK_LETTERS), thought, f"{w} has {len(w)} letters.", Expect("chains over turns", "number", str(len(w))))
