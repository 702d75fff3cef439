"""Words taken letter by letter: turned round, counted, indexed, sorted, repeated, joined."""

from __future__ import annotations

from training.conversations import Exchange, Expect
from training.digits import spaced
from training.phrasings import Draw
from training.words import WORDS, capitalised, made_up, word

ASK_REVERSE = "letters/reverse"
ASK_COUNT = "letters/count"
ASK_LENGTH = "letters/length"
ASK_VOWELS = "letters/vowels"
ASK_NTH = "letters/nth"
ASK_UPPER = "letters/upper"
ASK_SORT_NUMBERS = "letters/sort_numbers"
ASK_SORT_WORDS = "letters/sort_words"
ASK_FIRST = "letters/first"
ASK_LAST = "letters/last"
ASK_REPEAT = "letters/repeat"
ASK_ECHO = "letters/echo"
ASK_JOIN = "letters/join"
ASK_PALINDROME = "letters/palindrome"
ASK_SPELL = "letters/spell"
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
SHORT_ORDINALS = "1st 2nd 3rd 4th 5th 6th 7th 8th 9th 10th".split()
PALINDROMES = "level radar civic rotor kayak refer madam noon deed peep otto anna hannah stats tenet solos racecar sagas eve".split()


def quoted(draw: Draw, text: str) -> str:
    """The word as people put it into a question: bare or in some quotes."""
    return draw.pick(("{}", "{}", '"{}"', '"{}"', "'{}'", "*{}*", "`{}`")).format(text)


def _cased(draw: Draw, text: str) -> str:
    return capitalised(draw, text) if draw.chance(0.12) else text


def reverse(draw: Draw, given: str = "") -> Exchange:
    """Thought and answer write a word after a space or in the question's quotes: copied as the same tokens."""
    w = _cased(draw, given or word(draw))
    back, asked = w[::-1], quoted(draw, w)
    thought = f"Reverse {asked}: {spaced(w)}\nBackwards: {spaced(back)}\nTogether: {back}"
    answer = draw.say("Backwards it is {b}.", "It's {b}.", "That's {b}.", "Backwards, {w} is {b}.", "In reverse: {b}", b=back, w=w)
    return Exchange(draw.ask(ASK_REVERSE, w=asked), thought, answer, Expect("reversed words", "has_word", back))


def count(draw: Draw) -> Exchange:
    w = _cased(draw, word(draw))
    letter = draw.pick(w).lower() if draw.chance(0.8) else draw.pick("abcdefghijklmnopqrstuvwxyz")
    steps, seen = [], 0
    for x in w.lower():
        seen += x == letter
        steps.append(f"{x} {seen}")
    answer = _counted(draw, w, letter, seen)
    shown = letter.upper() if draw.chance(0.1) else letter
    user = draw.ask(ASK_COUNT, w=quoted(draw, w), l=shown)
    thought = f"Count {letter} in {w}, letter by letter: {', '.join(steps)}. So {seen}."
    return Exchange(user, thought, answer, Expect("letters counted", "number", str(seen)))


def _counted(draw: Draw, w: str, letter: str, seen: int) -> str:
    if seen == 0:
        return draw.say("There is no {l} in {w}: 0.", "{w} has 0 of them.", w=w, l=letter)
    return draw.say("{w} has {n} {l}{s}.", "There {are} {n} {l}{s} in {w}.", "{n}.", w=w, l=letter, n=seen, s="" if seen == 1 else "'s", are="is" if seen == 1 else "are")


def length(draw: Draw) -> Exchange:
    w = _cased(draw, word(draw))
    steps = ", ".join(f"{x} {at}" for at, x in enumerate(w, 1))
    answer = draw.say("{w} has {n} letters.", "{n} letters.", "{n}.", w=w, n=len(w))
    thought = f"Letters of {w}: {steps}. So {len(w)}."
    return Exchange(draw.ask(ASK_LENGTH, w=quoted(draw, w)), thought, answer, Expect("letters counted", "number", str(len(w))))


def vowels(draw: Draw) -> Exchange:
    w, steps, seen = word(draw), [], 0
    for x in w:
        seen += x in "aeiou"
        steps.append(f"{x} {seen}")
    thought = f"Count a, e, i, o, u in {w}: {', '.join(steps)}. So {seen}."
    answer = draw.say("{w} has {n} vowel{s}.", "{n}.", w=w, n=seen, s="" if seen == 1 else "s")
    return Exchange(draw.ask(ASK_VOWELS, w=quoted(draw, w)), thought, answer, Expect("letters counted", "number", str(seen)))


def nth(draw: Draw) -> Exchange:
    w = word(draw)
    at = draw.between(1, min(len(w), 10))
    asked = draw.pick((ORDINALS[at - 1], SHORT_ORDINALS[at - 1]))
    if draw.chance(0.12):
        at, asked = len(w), "last"
    steps = ", ".join(f"{x} {n}" for n, x in enumerate(w[:at], 1))
    answer = draw.say("The {n} letter of {w} is {l}.", "It's {l}.", "{l}", n=asked, w=w, l=w[at - 1])
    thought = f"Letters of {w}: {steps}. So {w[at - 1]}."
    return Exchange(draw.ask(ASK_NTH, n=asked, w=quoted(draw, w)), thought, answer, Expect("other word tasks", "ends_with_word", w[at - 1]))


def upper(draw: Draw) -> Exchange:
    w = " ".join(word(draw) for _ in range(draw.between(2, 3) if draw.chance(0.25) else 1))
    thought = "\n".join(f"Letters of {part}: {spaced(part)}\nCapitals: {spaced(part.upper())}" for part in w.split())
    return Exchange(draw.ask(ASK_UPPER, w=quoted(draw, w)), thought, w.upper(), Expect("other word tasks", "has_word", w.upper()))


def spell(draw: Draw) -> Exchange:
    w = _cased(draw, word(draw))
    thought = f"The letters of {w}: {spaced(w)}"
    return Exchange(draw.ask(ASK_SPELL, w=quoted(draw, w)), thought, spaced(w) if draw.chance(0.5) else "-".join(w))


def sort_numbers(draw: Draw) -> Exchange:
    numbers = [draw.between(0, draw.pick((9, 99, 999))) for _ in range(draw.between(3, 6))]
    left, steps = list(numbers), []
    while len(left) > 1:
        least = min(left)
        left.remove(least)
        steps.append(f"Smallest: {least}, left: {' '.join(map(str, left))}")
    result = ", ".join(map(str, sorted(numbers)))
    thought = f"Numbers: {' '.join(map(str, numbers))}\n" + "\n".join(steps)
    user = draw.ask(ASK_SORT_NUMBERS, x=_listed(draw, [str(n) for n in numbers]))
    return Exchange(user, thought, draw.say("{r}", "Sorted: {r}", "In order: {r}.", r=result), Expect("other word tasks", "contains", result))


def sort_words(draw: Draw) -> Exchange:
    chosen: dict[str, str] = {}
    for _ in range(draw.between(3, 5)):
        w = draw.pick(WORDS) if draw.chance(0.8) else made_up(draw)
        chosen.setdefault(w[0], w)
    items = list(chosen.values())
    order = sorted(items)
    thought = f"First letters: {' '.join(w[0] for w in items)}. In order: {' '.join(w[0] for w in order)}."
    result = ", ".join(order)
    user = draw.ask(ASK_SORT_WORDS, x=_listed(draw, items))
    return Exchange(user, thought, draw.say("{r}", "Sorted: {r}", "In order: {r}.", r=result), Expect("other word tasks", "contains", result))


def _listed(draw: Draw, items: list[str]) -> str:
    if draw.chance(0.15):
        return ", ".join(items[:-1]) + " and " + items[-1]
    return draw.pick((", ", ", ", " ", "; ")).join(items)


def first_or_last(draw: Draw) -> Exchange:
    items = [word(draw) for _ in range(draw.between(3, 6))]
    wanted, bank, where = (items[0], ASK_FIRST, "first") if draw.chance(0.5) else (items[-1], ASK_LAST, "last")
    thought = f"The list is {', '.join(items)}. The {where} is {wanted}."
    answer = draw.say("{w}", "The {p} one is {w}.", "It's {w}.", w=wanted, p=where)
    return Exchange(draw.ask(bank, x=_listed(draw, items)), thought, answer, Expect("other word tasks", "has_word", wanted))


def repeat(draw: Draw) -> Exchange:
    w, times = word(draw), draw.between(2, 6)
    said = " ".join([w] * times)
    thought = "Repeat it: " + ", ".join(f"{n} {w}" for n in range(1, times + 1)) + "."
    amount = str(times) if draw.chance(0.6) else "zero one two three four five six".split()[times]
    return Exchange(draw.ask(ASK_REPEAT, w=quoted(draw, w), n=amount), thought, said, Expect("other word tasks", "contains", said))


def echo(draw: Draw) -> Exchange:
    said = " ".join(word(draw) for _ in range(draw.between(1, 5)))
    if draw.chance(0.3):
        said = said.capitalize() + draw.pick((".", "!"))
    return Exchange(draw.ask(ASK_ECHO, w=f'"{said}"' if draw.chance(0.5) else said), f"Say it as given: {said}", said, Expect("other word tasks", "contains", said))


def join(draw: Draw) -> Exchange:
    items = [word(draw) for _ in range(draw.between(2, 4))]
    sign, called = draw.pick((("-", "a dash"), ("-", "-"), ("_", "_"), ("+", "+"), ("/", "/"), (", ", "commas"), (".", "dots"), ("-", "hyphens"), ("_", "underscores"), ("", "nothing")))
    said = sign.join(items)
    thought = f"The words are {' '.join(items)}. With {called} between: {said}"
    return Exchange(draw.ask(ASK_JOIN, x=_listed(draw, items), s=called), thought, said, Expect("other word tasks", "contains", said))


def palindrome(draw: Draw) -> Exchange:
    w = draw.pick(PALINDROMES) if draw.chance(0.3) else word(draw)
    if draw.chance(0.25):
        half = word(draw)[:4]
        w = half + half[-2::-1]
    back = w[::-1]
    same = w == back
    thought = f"Letters of {w}: {spaced(w)}\nBackwards: {spaced(back)}\nCompare {w} and {back}: {'the same' if same else 'not the same'}."
    yes = draw.say("Yes, {w} is a palindrome.", "Yes, {w} reads the same both ways.", w=w)
    no = draw.say("No, {w} is not a palindrome: backwards it is {b}.", "No, backwards {w} is {b}.", w=w, b=back)
    return Exchange(draw.ask(ASK_PALINDROME, w=quoted(draw, w)), thought, yes if same else no, Expect("other word tasks", "starts_with", "Yes" if same else "No"))


def any_one(draw: Draw) -> Exchange:
    kind = draw.random.random()
    if kind < 0.36:
        return reverse(draw)
    if kind < 0.55:
        return count(draw)
    if kind < 0.64:
        return length(draw)
    return draw.pick((vowels, nth, nth, upper, spell, spell, sort_numbers, sort_numbers, sort_words, first_or_last, repeat, echo, join, palindrome))(draw)


