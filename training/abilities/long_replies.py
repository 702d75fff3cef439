"""Replies of some length, for stop and continue: counting, tables, alphabets, lists, a few known programs."""

from __future__ import annotations

from training.abilities.facts import DAYS, MONTHS
from training.abilities.programs import PROGRAMS
from training.conversations import Exchange, Expect
from training.phrasings import Draw
from training.words import in_words

ASK_COUNT = "long_replies/count"
ASK_COUNT_TO = "long_replies/count_to"
ASK_DOWN = "long_replies/down"
ASK_SQUARES = "long_replies/squares"
ASK_TIMES = "long_replies/times"
ASK_ALPHABET = "long_replies/alphabet"
ASK_DAYS = "long_replies/days"
ASK_MONTHS = "long_replies/months"
ASK_WORDS = "long_replies/words"
ASK_EVEN = "long_replies/even"
ASK_PROGRAM = "long_replies/program"
ASK_PROGRAM_ANY = "long_replies/program_any"
ASK_ITEMS = "long_replies/items"
ASK_SOME_ITEMS = "long_replies/some_items"
ASK_ALL_ITEMS = "long_replies/all_items"
ITEMS = {
    "fruits": "apple banana cherry grape lemon mango melon orange peach pear plum fig".split(),
    "vegetables": "carrot potato tomato onion spinach cucumber cabbage pumpkin garlic beans lettuce peas".split(),
    "animals": "cat dog horse cow sheep fox wolf bear lion tiger elephant rabbit".split(),
    "birds": "owl eagle crow swan duck goose hen parrot penguin pigeon robin sparrow".split(),
    "colours": "red blue green yellow orange purple pink brown black white grey turquoise".split(),
    "instruments": "piano guitar violin flute drum trumpet harp cello organ clarinet tuba banjo".split(),
    "trees": "oak maple willow birch cedar pine beech elm ash fir palm walnut".split(),
    "flowers": "rose tulip daisy lily violet poppy iris sunflower orchid lavender jasmine peony".split(),
    "drinks": "water tea coffee milk juice lemonade cocoa beer wine soda cider punch".split(),
    "languages": "English French Spanish German Italian Dutch Polish Greek Turkish Japanese Chinese Hindi".split(),
    "words": "apple bridge candle door echo forest garden harbor island jacket kettle lamp".split(),
    "names": "Anna Ben Clara David Emma Felix Grace Hugo Iris Jonas Kate Leo".split(),
    "shapes": "circle square triangle rectangle oval star diamond heart hexagon pentagon cube sphere".split(),
}
ALL_ITEMS = {
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "seasons": "spring summer autumn winter".split(),
    "primary colours": "red yellow blue".split(),
    "vowels": "a e i o u".split(),
    "continents": "Africa|Antarctica|Asia|Australia|Europe|North America|South America".split("|"),
}
CALLED = {
    "hello world": ("hello world", "a hello world program", "Hello World"),
    "fizzbuzz": ("fizzbuzz", "FizzBuzz", "fizz buzz"),
    "factorial": ("factorial", "a factorial function", "the factorial"),
    "fibonacci": ("fibonacci", "the Fibonacci numbers", "a Fibonacci function", "the fibonacci sequence"),
}


def _long(user: str, thought: str, answer: str) -> Exchange:
    return Exchange(user, thought, answer, Expect("long replies", "equals", answer))


def count(draw: Draw) -> Exchange:
    most = draw.pick((10, 20, 20, 30, 50, 50, 100, 100, 150, 200))
    first = 1 if draw.chance(0.6) else draw.between(0, 300)
    last = first + most - 1 if first != 1 else draw.pick((most, draw.between(5, most)))
    numbers = [str(n) for n in range(first, last + 1)]
    user = draw.ask(ASK_COUNT_TO, b=last) if first == 1 and draw.chance(0.6) else draw.ask(ASK_COUNT, a=first, b=last)
    return _long(user, f"Count from {first} to {last}.", ", ".join(numbers))


def down(draw: Draw) -> Exchange:
    first = draw.between(3, 50)
    return _long(draw.ask(ASK_DOWN, a=first), f"Count down from {first} to 1.", ", ".join(str(n) for n in range(first, 0, -1)))


def squares(draw: Draw) -> Exchange:
    last = draw.between(3, 30)
    rows = "".join(f"\n| {n} | {n * n} |" for n in range(1, last + 1))
    return _long(draw.ask(ASK_SQUARES, b=last), f"A table with the squares of 1 to {last}.", f"| n | n² |\n| --- | --- |{rows}")


def times(draw: Draw) -> Exchange:
    number, last = draw.between(2, 20), 10
    rows = "".join(f"\n| {number} × {n} | {number * n} |" for n in range(1, last + 1))
    return _long(draw.ask(ASK_TIMES, a=number), f"The products {number} × 1 to {number} × {last}.", f"| product | result |\n| --- | --- |{rows}")


def alphabet(draw: Draw) -> Exchange:
    return _long(draw.ask(ASK_ALPHABET), "The 26 letters.", " ".join("abcdefghijklmnopqrstuvwxyz"))


def days(draw: Draw) -> Exchange:
    return _long(draw.ask(ASK_DAYS), "The seven days.", "\n".join(f"{n}. {day}" for n, day in enumerate(DAYS, 1)))


def months(draw: Draw) -> Exchange:
    return _long(draw.ask(ASK_MONTHS), "The twelve months.", "\n".join(f"{n}. {month}" for n, month in enumerate(MONTHS, 1)))


def number_words(draw: Draw) -> Exchange:
    last = draw.between(5, 60)
    return _long(draw.ask(ASK_WORDS, b=last), f"Number words from 1 to {last}.", ", ".join(in_words(n) for n in range(1, last + 1)))


def evens(draw: Draw) -> Exchange:
    last = draw.between(5, 60) * 2
    return _long(draw.ask(ASK_EVEN, b=last), f"Even numbers from 2 to {last}.", ", ".join(str(n) for n in range(2, last + 1, 2)))


def program(draw: Draw) -> Exchange:
    (task, language), code = draw.pick(tuple(PROGRAMS.items()))
    called = draw.pick(CALLED[task])
    user = draw.ask(ASK_PROGRAM, p=called, l=draw.typed(language))
    return _long(user, f"I know {task} in {language}.", f"```{language.lower()}\n{code}\n```")


def program_any(draw: Draw) -> Exchange:
    """A known program without a language: it is written in Python."""
    task = draw.pick(tuple(CALLED))
    called = draw.pick(CALLED[task])
    user = draw.ask(ASK_PROGRAM_ANY, p=called)
    return _long(user, f"I know {task} in Python.", f"```python\n{PROGRAMS[task, 'Python']}\n```")


def items(draw: Draw) -> Exchange:
    if draw.chance(0.4):
        kind, listed = draw.pick(tuple(ALL_ITEMS.items()))
        return _long(draw.ask(ASK_ALL_ITEMS, k=_american(draw, kind)), f"All {kind}: {len(listed)}.", _numbered(listed))
    kind, listed = draw.pick(tuple(ITEMS.items()))
    some = draw.chance(0.4)
    count = 5 if some else draw.between(2, 12)
    slots = {"k": _american(draw, kind), "n": str(count) if draw.chance(0.7) else in_words(count)}
    user = draw.ask(ASK_SOME_ITEMS, k=slots["k"]) if some else draw.ask(ASK_ITEMS, **slots)
    return _long(user, f"{count} {kind}.", _numbered(listed[:count]))


def _american(draw: Draw, kind: str) -> str:
    return kind.replace("colour", "color") if draw.chance(0.4) else kind


def _numbered(listed: list[str]) -> str:
    return "\n".join(f"{n}. {item}" for n, item in enumerate(listed, 1))


def any_one(draw: Draw) -> Exchange:
    return draw.pick((count, count, count, down, squares, times, times, alphabet, days, months, number_words, evens, program, program, program_any, items, items, items))(draw)
