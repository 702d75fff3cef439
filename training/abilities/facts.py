"""Small things the model really knows, from tables written here."""

from __future__ import annotations

from training import digits
from training.conversations import Exchange, Expect
from training.phrasings import Draw
from training.words import in_words

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
MIXES = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple", ("red", "white"): "pink",
    ("black", "white"): "grey", ("blue", "white"): "light blue", ("green", "red"): "brown", ("green", "white"): "light green",
    ("blue", "green"): "turquoise", ("black", "red"): "dark red", ("black", "blue"): "dark blue", ("orange", "blue"): "brown",
}
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "pig": "oink", "duck": "quack", "horse": "neigh", "rooster": "cock-a-doodle-doo",
    "hen": "cluck", "owl": "hoot", "frog": "ribbit", "bee": "buzz", "lion": "roar", "snake": "hiss", "mouse": "squeak", "crow": "caw",
    "wolf": "howl", "goat": "bleat", "donkey": "hee-haw", "turkey": "gobble", "pigeon": "coo", "bear": "growl", "elephant": "trumpet", "goose": "honk",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "black": "white", "fast": "slow", "old": "young", "happy": "sad",
    "open": "closed", "full": "empty", "hard": "soft", "high": "low", "light": "dark", "loud": "quiet", "early": "late", "wet": "dry", "rich": "poor",
    "strong": "weak", "thick": "thin", "true": "false", "wide": "narrow", "in": "out", "on": "off", "first": "last", "start": "end", "good": "bad",
    "clean": "dirty", "long": "short", "near": "far", "easy": "difficult", "cheap": "expensive", "sweet": "sour", "brave": "cowardly", "yes": "no",
    "always": "never", "win": "lose", "buy": "sell", "push": "pull", "love": "hate", "smooth": "rough", "deep": "shallow", "inside": "outside",
    "front": "back", "heavy": "light", "noisy": "quiet", "polite": "rude", "ancient": "modern", "north": "south", "east": "west",
}
UNITS = {
    ("kilometre", "metre"): 1000, ("metre", "centimetre"): 100, ("centimetre", "millimetre"): 10, ("kilogram", "gram"): 1000, ("tonne", "kilogram"): 1000,
    ("litre", "millilitre"): 1000, ("hour", "minute"): 60, ("minute", "second"): 60, ("day", "hour"): 24, ("week", "day"): 7, ("year", "month"): 12,
    ("foot", "inch"): 12, ("yard", "foot"): 3, ("dozen", "piece"): 12, ("decade", "year"): 10, ("century", "year"): 100, ("metre", "millimetre"): 1000,
    ("pound", "ounce"): 16, ("gallon", "pint"): 8, ("kilobyte", "byte"): 1000, ("byte", "bit"): 8,
}
GREETINGS = {
    "French": "Bonjour", "Spanish": "Hola", "German": "Hallo", "Italian": "Ciao", "Portuguese": "Olá", "Dutch": "Hoi", "Swedish": "Hej", "Polish": "Cześć",
    "Japanese": "こんにちは (Konnichiwa)", "Chinese": "你好 (Nǐ hǎo)", "Russian": "Привет (Privet)", "Arabic": "مرحبا (Marhaba)", "Hindi": "नमस्ते (Namaste)",
    "Korean": "안녕하세요 (Annyeonghaseyo)", "Turkish": "Merhaba", "Greek": "Γεια σου (Yia sou)", "Finnish": "Hei", "Swahili": "Jambo", "Hawaiian": "Aloha",
    "English": "Hello", "Czech": "Ahoj", "Hungarian": "Szia", "Welsh": "Helo", "Latin": "Salve",
}
ONE_OF = {
    ("a week", "days"): 7, ("a year", "months"): 12, ("a day", "hours"): 24, ("an hour", "minutes"): 60, ("a minute", "seconds"): 60, ("a year", "days"): 365,
    ("a year", "weeks"): 52, ("the alphabet", "letters"): 26, ("a leap year", "days"): 366, ("a year", "seasons"): 4, ("a century", "years"): 100, ("a decade", "years"): 10,
    ("a dozen", "pieces"): 12, ("a kilometre", "metres"): 1000, ("a metre", "centimetres"): 100, ("a kilogram", "grams"): 1000, ("a foot", "inches"): 12, ("a byte", "bits"): 8,
    ("a litre", "millilitres"): 1000, ("a yard", "feet"): 3, ("a triangle", "sides"): 3, ("a square", "sides"): 4, ("a weekend", "days"): 2, ("a car", "wheels"): 4,
    ("a bicycle", "wheels"): 2, ("a hand", "fingers"): 5, ("an octopus", "arms"): 8, ("a pair", "pieces"): 2,
}
SHORT_UNITS = {
    "kilometre": "km", "metre": "m", "centimetre": "cm", "millimetre": "mm", "kilogram": "kg", "gram": "g", "litre": "l", "millilitre": "ml",
    "hour": "h", "minute": "min", "foot": "ft", "inch": "in", "pound": "lb", "ounce": "oz", "kilobyte": "kB",
}
YOUNG = {"cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "horse": "foal", "pig": "piglet", "goat": "kid", "duck": "duckling", "hen": "chick", "bear": "cub", "frog": "tadpole", "goose": "gosling", "deer": "fawn", "swan": "cygnet"}
LEGS = {"spider": 8, "dog": 4, "cat": 4, "bird": 2, "ant": 6, "bee": 6, "horse": 4, "snake": 0, "fish": 0, "beetle": 6, "cow": 4, "duck": 2, "crab": 10, "octopus": 8}

ASK_AFTER_DAY = "facts/after_day"
ASK_BEFORE_DAY = "facts/before_day"
ASK_AFTER_MONTH = "facts/after_month"
ASK_BEFORE_MONTH = "facts/before_month"
ASK_MONTH_DAYS = "facts/month_days"
ASK_MONTH_NUMBER = "facts/month_number"
ASK_NTH_MONTH = "facts/nth_month"
ASK_MIX = "facts/mix"
ASK_SOUND = "facts/sound"
ASK_OPPOSITE = "facts/opposite"
ASK_UNITS = "facts/units"
ASK_ONE_UNIT = "facts/one_unit"
ASK_NUMBER_WORD = "facts/number_word"
ASK_WORD_NUMBER = "facts/word_number"
ASK_GREETING = "facts/greeting"
ASK_YOUNG = "facts/young"
ASK_LEGS = "facts/legs"
PLURALS = {"foot": "feet", "inch": "inches", "century": "centuries"}


def ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 < number % 100 < 14 else ends.get(number % 10, 'th')}"


def plural(unit: str) -> str:
    return PLURALS.get(unit, unit + "s")


def _told(user: str, thought: str, answer: str, wanted: str) -> Exchange:
    return Exchange(user, thought, answer, Expect("small facts", "number" if wanted.isdigit() else "contains_any_case", wanted))


def day(draw: Draw) -> Exchange:
    at = draw.between(0, 6)
    step, bank, how = (1, ASK_AFTER_DAY, "after") if draw.chance(0.6) else (-1, ASK_BEFORE_DAY, "before")
    found = DAYS[(at + step) % 7]
    answer = draw.say("{f}.", "The day {h} {x} is {f}.", "It's {f}.", f=found, h=how, x=DAYS[at])
    return _told(draw.ask(bank, x=draw.typed(DAYS[at])), f"The day {how} {DAYS[at]} is {found}.", answer, found)


def month(draw: Draw) -> Exchange:
    at = draw.between(0, 11)
    kind = draw.between(0, 4)
    x = MONTHS[at]
    if kind < 2:
        step, bank, how = (1, ASK_AFTER_MONTH, "after") if kind else (-1, ASK_BEFORE_MONTH, "before")
        found = MONTHS[(at + step) % 12]
        answer = draw.say("{f}.", "The month {h} {x} is {f}.", "It's {f}.", f=found, h=how, x=x)
        return _told(draw.ask(bank, x=draw.typed(x)), f"The month {how} {x} is {found}.", answer, found)
    if kind == 2:
        days = str(MONTH_DAYS[at])
        more = ", or 29 in a leap year" if at == 1 else ""
        return _told(draw.ask(ASK_MONTH_DAYS, x=draw.typed(x)), f"{x} has {days} days.", f"{x} has {days} days{more}.", days)
    if kind == 3:
        return _told(draw.ask(ASK_MONTH_NUMBER, x=draw.typed(x)), f"{x} is month {at + 1}.", f"{x} is the {ordinal(at + 1)} month of the year.", ordinal(at + 1))
    asked = ordinal(at + 1)
    return _told(draw.ask(ASK_NTH_MONTH, x=asked), f"Month {at + 1} is {x}.", f"The {asked} month is {x}.", x)


def mix(draw: Draw) -> Exchange:
    (a, b), made = draw.pick(tuple(MIXES.items()))
    if draw.chance(0.5):
        a, b = b, a
    answer = draw.say("{a} and {b} make {c}.", "{C}.", "You get {c}.", a=a.capitalize(), b=b, c=made, C=made.capitalize())
    return _told(draw.ask(ASK_MIX, a=a, b=b), f"{a} and {b} mixed give {made}.", answer, made)


def sound(draw: Draw) -> Exchange:
    animal, noise = draw.pick(tuple(SOUNDS.items()))
    answer = draw.say("{n}!", 'A {x} says "{s}".', "It goes {s}.", n=noise.capitalize(), s=noise, x=animal)
    return _told(draw.ask(ASK_SOUND, x=animal), f"A {animal} says {noise}.", answer, noise)


def opposite(draw: Draw) -> Exchange:
    a, b = draw.pick(tuple(OPPOSITES.items()))
    backward = draw.chance(0.5) and list(OPPOSITES.values()).count(b) == 1 and b not in OPPOSITES
    a, b = (b, a) if backward else (a, b)
    answer = draw.say("The opposite of {a} is {b}.", "{B}.", "It's {b}.", a=a, b=b, B=b.capitalize())
    return _told(draw.ask(ASK_OPPOSITE, x=a if draw.chance(0.6) else f'"{a}"'), f"The opposite of {a} is {b}.", answer, b)


def units(draw: Draw) -> Exchange:
    (large, small), factor = draw.pick(tuple(UNITS.items()))
    number = draw.between(2, 30) if draw.chance(0.8) else draw.between(2, 99)
    thought, result = digits.multiply(number, factor) if factor not in (10, 100, 1000) else (f"{number}×{factor}={number * factor}", number * factor)
    amount = f"{number} {plural(large)}" if number != 1 else f"1 {large}"
    answer = draw.say("{a} are {r} {s}.", "{r} {s}.", "That's {r} {s}.", a=amount, r=result, s=plural(small))
    short = large in SHORT_UNITS and small in SHORT_UNITS and draw.chance(0.3)
    said = (SHORT_UNITS[large], SHORT_UNITS[small]) if short else (_spelt(draw, plural(large)), _spelt(draw, plural(small)))
    user = draw.ask(ASK_UNITS, n=number, l=said[0], s=said[1])
    return _told(user, f"One {large} has {factor} {plural(small)}, so {number}×{factor}.\n{thought}", answer, str(result))


def _spelt(draw: Draw, unit: str) -> str:
    """British or American."""
    return unit.replace("metre", "meter").replace("litre", "liter") if draw.chance(0.4) else unit


def one_unit(draw: Draw) -> Exchange:
    (whole, part), count = draw.pick(tuple(ONE_OF.items()))
    said = whole.replace("a ", "one ", 1) if whole.startswith("a ") and draw.chance(0.15) else whole
    answer = draw.say("{W} has {n} {p}.", "{n}.", "{n} {p}.", W=whole[0].upper() + whole[1:], n=count, p=part)
    return _told(draw.ask(ASK_ONE_UNIT, l=_spelt(draw, said), s=_spelt(draw, part)), f"{whole[0].upper() + whole[1:]} has {count} {part}.", answer, str(count))


def number_word(draw: Draw) -> Exchange:
    number = draw.between(0, draw.pick((20, 99, 999, 9999)))
    text = in_words(number)
    if draw.chance(0.35):
        return _told(draw.ask(ASK_WORD_NUMBER, x=text), f"{text} is {number}.", draw.say("{n}", "That's {n}.", n=number), str(number))
    return _told(draw.ask(ASK_NUMBER_WORD, x=number), f"{number} is {text}.", draw.say("{t}", "{n} is {t}.", t=text, n=number), text)


def greeting(draw: Draw) -> Exchange:
    language, hello = draw.pick(tuple(GREETINGS.items()))
    answer = draw.say("{h}!", "In {x} you say: {h}.", '"{h}" is hello in {x}.', h=hello, x=language)
    return _told(draw.ask(ASK_GREETING, x=draw.typed(language)), f"Hello in {language} is {hello}.", answer, hello.split(" ")[0])


def young(draw: Draw) -> Exchange:
    animal, baby = draw.pick(tuple(YOUNG.items()))
    return _told(draw.ask(ASK_YOUNG, x=animal), f"A young {animal} is a {baby}.", draw.say("A baby {x} is called a {y}.", "A {y}.", x=animal, y=baby), baby)


def legs(draw: Draw) -> Exchange:
    animal, count = draw.pick(tuple(LEGS.items()))
    a = "an" if animal[0] in "ao" else "a"
    answer = f"{a.capitalize()} {animal} has {count} legs." if count else f"{a.capitalize()} {animal} has no legs: 0."
    return _told(draw.ask(ASK_LEGS, x=animal), f"{a.capitalize()} {animal}: {count} legs.", answer, str(count))


def any_one(draw: Draw) -> Exchange:
    return draw.pick((day, month, month, mix, sound, opposite, opposite, units, units, one_unit, one_unit, number_word, number_word, greeting, young, legs))(draw)
