"""Sums, differences, products, quotients, comparisons and small stories about them, worked out digit by digit."""

from __future__ import annotations

from collections.abc import Callable

from training import digits
from training.conversations import Exchange, Expect
from training.phrasings import Draw, Split
from training.words import NAMES, THINGS, in_words

ASK_SUM = "arithmetic/sum"
ASK_DIFFERENCE = "arithmetic/difference"
ASK_PRODUCT = "arithmetic/product"
ASK_QUOTIENT = "arithmetic/quotient"
ASK_COMPARE = "arithmetic/compare"
ASK_SMALLER = "arithmetic/smaller"
ASK_THREE = "arithmetic/three"
ASK_IN_WORDS = "arithmetic/in_words"
ASK_IS_BIGGER = "arithmetic/is_bigger"
ASK_NEXT = "arithmetic/next"
ASK_PREVIOUS = "arithmetic/previous"
STORIES_ADD = "arithmetic/stories_add"
STORIES_SUBTRACT = "arithmetic/stories_subtract"
STORIES_MULTIPLY = "arithmetic/stories_multiply"
ANSWERS = ("{a} {o} {b} = {r}.", "The answer is {r}.", "That's {r}.", "{a} {o} {b} is {r}.", "It's {r}.")
SIGNS = {"sum": "+", "difference": "-", "product": "×"}


def operand(draw: Draw, most: int) -> int:
    """A number of one to `most` digits, each length about as often."""
    size = draw.between(1, most)
    return draw.between(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def held_out(a: int, b: int) -> bool:
    """Whether a pair of operands is kept from training, in either order: one in eleven is."""
    return (min(a, b) * 1_000_003 + max(a, b)) * 2_654_435_761 % 2**32 % 11 == 0


def pair(draw: Draw, first: Callable[[], int], second: Callable[[], int]) -> tuple[int, int]:
    """Two operands that belong to this draw's half."""
    kept_back = draw.split is Split.HELD_OUT
    while held_out(*(found := (first(), second()))) != kept_back:
        pass
    return found


def _answered(draw: Draw, user: str, bar: str, sign: str, a: int, b: int, worked: tuple[str, int], lead: str = "") -> Exchange:
    thought, result = worked
    answer = draw.say(*ANSWERS, a=a, b=b, o=sign, r=result)
    return Exchange(user, lead + thought, answer, Expect(bar, "last_number", str(result)))


def sum_(draw: Draw, most: int = 0) -> Exchange:
    most = most or (4 if draw.chance(0.5) else 6)
    a, b = pair(draw, lambda: operand(draw, most), lambda: operand(draw, most))
    return _answered(draw, draw.ask(ASK_SUM, a=a, b=b), _bar("sums", most), "+", a, b, digits.add(a, b))


def difference(draw: Draw, most: int = 0) -> Exchange:
    most = most or (4 if draw.chance(0.5) else 6)
    a, b = pair(draw, lambda: operand(draw, most), lambda: operand(draw, most))
    if a < b and draw.chance(0.75):
        a, b = b, a
    return _answered(draw, draw.ask(ASK_DIFFERENCE, a=a, b=b), _bar("sums", most), "-", a, b, digits.subtract(a, b))


def _bar(name: str, most: int) -> str:
    return f"{name} to {4 if most <= 4 else 6} digits"


def product(draw: Draw) -> Exchange:
    a, b = pair(draw, lambda: operand(draw, 3), lambda: operand(draw, 2))
    if draw.chance(0.3):
        a, b = b, a
    user = draw.ask(ASK_PRODUCT, a=a, b=b)
    if len(str(b)) > len(str(a)):
        return _answered(draw, user, "products", "×", a, b, digits.multiply(b, a), f"{a}×{b} is {b}×{a}.\n")
    return _answered(draw, user, "products", "×", a, b, digits.multiply(a, b))


def quotient(draw: Draw) -> Exchange:
    a, b = pair(draw, lambda: operand(draw, 3) if draw.chance(0.4) else draw.between(100, 999), lambda: draw.between(2, 9))
    thought, (whole, rest) = digits.divide(a, b)
    answer = draw.say(
        "{a} ÷ {b} = {q} remainder {r}.", "{a} divided by {b} is {q}, remainder {r}.", "That's {q} with a remainder of {r}.",
        a=a, b=b, q=whole, r=rest,
    )
    return Exchange(draw.ask(ASK_QUOTIENT, a=a, b=b), thought, answer, Expect("division", "last_numbers", [str(whole), str(rest)]))


def comparison(draw: Draw) -> Exchange:
    a = operand(draw, 6)
    b = _near(draw, a) if draw.chance(0.5) else operand(draw, 6)
    thought, bigger = digits.compare(a, b)
    if a == b:
        equal = f"They are equal: both are {a}."
        return Exchange(draw.ask(ASK_COMPARE, a=a, b=b), thought, equal, Expect("comparisons", "first_number", str(a)))
    if draw.chance(0.35):
        wanted, user, how = min(a, b), draw.ask(ASK_SMALLER, a=a, b=b), "smaller"
        thought += f" So {wanted} is smaller."
    else:
        wanted, user, how = bigger, draw.ask(ASK_COMPARE, a=a, b=b), "greater"
    answer = draw.say("{w} is {h}.", "The {h} number is {w}.", "{w}.", "{w} is {h} than {o}.", w=wanted, h=how, o=min(a, b) if how == "greater" else bigger)
    return Exchange(user, thought, answer, Expect("comparisons", "first_number", str(wanted)))


def is_bigger(draw: Draw) -> Exchange:
    """The comparison as a question to be answered by yes or no."""
    a = operand(draw, 6)
    b = _near(draw, a) if draw.chance(0.3) else operand(draw, 6)
    thought, bigger = digits.compare(a, b)
    more = draw.chance(0.65)
    how = draw.pick(("bigger", "greater", "larger", "more") if more else ("smaller", "less"))
    yes = a != b and (a == bigger) == more
    if a == b:
        answer = f"No, they are equal: both are {a}."
    else:
        answer = f"{'Yes' if yes else 'No'}, {a} is {'greater' if a == bigger else 'smaller'} than {b}."
    return Exchange(draw.ask(ASK_IS_BIGGER, a=a, b=b, h=how), thought, answer, Expect("comparisons", "starts_with", "Yes" if yes else "No"))


def three(draw: Draw) -> Exchange:
    """Three numbers with + and -, taken two at a time."""
    a, b = pair(draw, lambda: operand(draw, 3), lambda: operand(draw, 3))
    minus_first = draw.chance(0.25) and a >= b
    start = a - b if minus_first else a + b
    _, c = pair(draw, lambda: start, lambda: operand(draw, 3))
    minus_last = draw.chance(0.3) and start >= c
    first, middle = digits.subtract(a, b) if minus_first else digits.add(a, b)
    second, result = digits.subtract(middle, c) if minus_last else digits.add(middle, c)
    signs = {"o": "-" if minus_first else "+", "p": "-" if minus_last else "+"}
    user = draw.ask(ASK_THREE, a=a, b=b, c=c, **signs)
    thought = f"Three numbers: first {a}{signs['o']}{b}, then {signs['p']}{c}.\n{first}\n{second}"
    answer = draw.say("{a} {o} {b} {p} {c} = {r}.", "That's {r}.", "The answer is {r}.", a=a, b=b, c=c, r=result, **signs)
    return Exchange(user, thought, answer, Expect("chains of three", "last_number", str(result)))


def spoken(draw: Draw) -> Exchange:
    """A sum whose numbers are words."""
    most = draw.pick((9, 20, 99))
    a, b = pair(draw, lambda: draw.between(0, most), lambda: draw.between(0, most))
    sign, said = draw.pick((("+", "plus"), ("+", "and"), ("+", "plus"), ("-", "minus"), ("×", "times"), ("×", "times")))
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    worked = {"+": digits.add, "-": digits.subtract, "×": digits.multiply}[sign](a, b)
    slots = {"a": in_words(a), "b": in_words(b), "A": in_words(a).capitalize(), "o": said}
    return _answered(draw, draw.ask(ASK_IN_WORDS, **slots), "sums in words", sign, a, b, worked, f"In digits: {a}{sign}{b}.\n")


def neighbour(draw: Draw) -> Exchange:
    """The number after one, or before it."""
    (a, _), after = pair(draw, lambda: max(1, operand(draw, 4)), lambda: 1), draw.chance(0.65)
    worked = digits.add(a, 1) if after else digits.subtract(a, 1)
    answer = draw.say("{r}.", "It's {r}.", "The number {h} {a} is {r}.", r=worked[1], a=a, h="after" if after else "before")
    user = draw.ask(ASK_NEXT if after else ASK_PREVIOUS, a=a)
    return Exchange(user, worked[0], answer, Expect("neighbours", "last_number", str(worked[1])))


def _near(draw: Draw, a: int) -> int:
    """A number as long as a that shares its first digits."""
    keep = draw.between(0, len(str(a)) - 1)
    tail = "".join(str(draw.between(0, 9)) for _ in range(len(str(a)) - keep))
    return int(str(a)[:keep] + tail)


def story(draw: Draw) -> Exchange:
    n, m = draw.sample(NAMES, 2)
    slots: dict[str, object] = {"n": n, "m": m, "t": draw.pick(THINGS)}
    kind = draw.pick(("add", "subtract", "multiply"))
    if kind == "multiply":
        a, b = pair(draw, lambda: operand(draw, 2), lambda: draw.between(2, 12))
        worked, bank, sign = digits.multiply(a, b), STORIES_MULTIPLY, "×"
    else:
        a, b = pair(draw, lambda: operand(draw, 3), lambda: operand(draw, 3))
        a, b = (max(a, b), min(a, b)) if kind == "subtract" else (a, b)
        worked = digits.add(a, b) if kind == "add" else digits.subtract(a, b)
        bank, sign = (STORIES_ADD, "+") if kind == "add" else (STORIES_SUBTRACT, "-")
    user = draw.ask(bank, a=a, b=b, **slots)
    return _answered(draw, user, "word problems", sign, a, b, worked, f"That is {a}{sign}{b}.\n")


def any_one(draw: Draw) -> Exchange:
    kind = draw.random.random()
    if kind < 0.25:
        return sum_(draw)
    if kind < 0.49:
        return difference(draw)
    if kind < 0.69:
        return product(draw)
    if kind < 0.79:
        return quotient(draw)
    return draw.pick((comparison, comparison, is_bigger, story, story, three, three, spoken, neighbour))(draw)
