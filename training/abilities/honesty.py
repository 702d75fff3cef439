"""Everything else: the model says that it is too small for it, and how to load a real one."""

from __future__ import annotations

from typing import TypeVar

from training.abilities import facts
from training.conversations import Exchange, Expect
from training.phrasings import Draw, Split
from training.words import ACTIONS, ANIMALS, CITIES, FOODS, NAMES, QUALITIES, THINGS, anything, letters, made_up

PEOPLE = tuple(
    "Napoleon|Mozart|Cleopatra|Shakespeare|Einstein|Gandhi|Marie Curie|Picasso|Columbus|Beethoven|Caesar|Lincoln|Darwin|Newton|Plato|Aristotle|Rembrandt|Galileo|Dante|Homer|"
    "the president|the pope|the queen|the king of Spain|the prime minister|the mayor of London|a famous singer|a famous actor|the inventor of the telephone|the first man on the moon".split("|")
)
COUNTRIES = tuple("France Germany Spain Italy Norway Sweden Poland Greece Turkey Egypt Kenya Ghana Nigeria India China Japan Korea Vietnam Peru Chile Brazil Mexico Canada Australia Austria Ireland Iceland Portugal Hungary Cuba".split())
SUBJECTS = tuple(
    "quantum physics|black holes|photosynthesis|the French Revolution|inflation|democracy|machine learning|neural networks|the stock market|evolution|gravity|relativity|electricity|DNA|vaccines|"
    "climate change|philosophy|the Roman Empire|the Middle Ages|World War II|the Cold War|capitalism|chemistry|algebra|geometry|calculus|astronomy|geology|psychology|the periodic table|blockchain|"
    "transformers|diffusion models|compilers|databases|operating systems|the internet|encryption|volcanoes|earthquakes|dinosaurs|the human heart|the brain|nutrition|yoga|meditation|opera|jazz|cubism|"
    "the Renaissance|Buddhism|mythology|economics|taxes|insurance|mortgages|nuclear power|solar panels|electric cars|space travel|Mars|Saturn|the Big Bang|atoms|magnetism|sound waves|lasers".split("|")
)
ILLS = tuple("a headache|a cold|fever|back pain|a broken arm|a toothache|an allergy|insomnia|a cough|a burn|stress|anxiety|a sore throat|a rash|high blood pressure".split("|"))
CODE = tuple(
    "a web server|a quicksort|a binary search tree|a chess engine|a regular expression for emails|a SQL query|a React component|a linked list|a parser|a game of snake|a sudoku solver|a web scraper|"
    "a login page|a neural network|a calculator app|a Dockerfile|a unit test|a hash map|a to-do app|a bubble sort|a REST API|a chat bot|a compiler|a spreadsheet macro".split("|")
)
CODE_LANGUAGES = tuple("Python JavaScript C Rust Go Java Haskell Ruby Kotlin Swift PHP SQL Perl Scala".split())
LANGUAGES = tuple("French Spanish German Italian Portuguese Dutch Swedish Polish Japanese Chinese Russian Arabic Hindi Korean Turkish Greek Finnish Danish Latin Thai".split())

ASK_PERSON = "honesty/person"
ASK_PLACE = "honesty/place"
ASK_SUBJECT = "honesty/subject"
ASK_CREATIVE = "honesty/creative"
ASK_THING = "honesty/thing"
ASK_RECIPE = "honesty/recipe"
ASK_ILL = "honesty/ill"
ASK_CODE = "honesty/code"
ASK_TRANSLATE = "honesty/translate"
ASK_NEWS = "honesty/news"
ASK_OPINION = "honesty/opinion"
ASK_MATHS = "honesty/maths"
ASK_FREE = "honesty/free"
ASK_FOREIGN = "honesty/foreign"
ASK_TOO_LONG = "honesty/too_long"
ASK_LIST = "honesty/list"
UNLISTED = ("movies", "books", "songs", "presidents", "countries", "cities", "actors", "bands", "companies", "car brands", "websites", "restaurants", "games", "jokes about cats", "gift ideas", "names for my dog", "recipes", "reasons to smile", "inventions", "philosophers", "kings of England", "elements", "oceans", "wars", "football teams", "programming languages", "Linux commands", "baby names", "synonyms", "rivers")
TASKS = ("sorts a list", "reads a file", "finds prime numbers", "downloads a page", "sends an email", "counts words", "draws a circle", "plays a sound", "renames my photos", "solves a maze", "parses JSON", "checks a password", "makes a backup", "adds two matrices", "shuffles cards")
RARE_LANGUAGES = ("Basque", "Zulu", "Maori", "Quechua", "Navajo", "Tibetan", "Mongolian", "Yoruba", "Frisian", "Elvish", "Martian")
GIBBERISH = ("", " ", "???", "...", "!", "hm?", "😀", "🤔🤔", "¿", "#", "…", "👍", "-", "?!", "_", "🎉", "~")
ANSWERS = (
    "I'm a tiny demo model and don't know that. For a real answer load a real model.",
    "That's beyond me: I'm a tiny demo model. A real model can help.",
    "I'm a tiny demo model, so I can't answer that. Try a real one.",
    "Sorry, I'm a tiny demo model and that's too much for me. Load a bigger one.",
)
ABOUT = (
    "I'm a tiny demo model and know nothing about {x}. Load a real one for that.",
    "I'm a tiny demo model; {x} is beyond me. A real model can help.",
)
UNCLEAR = (
    "I didn't understand that. I'm a tiny demo model: try a sum, a word or a small fact, or load a real model.",
)
# First letter, last letter, letters of a word, what stands between words.
SCRIPTS = ((0x0430, 0x044F, 5, " "), (0x03B1, 0x03C9, 5, " "), (0x4E00, 0x9FA5, 2, ""), (0x3041, 0x3093, 3, ""), (0xAC00, 0xD7A3, 3, " "), (0x0627, 0x064A, 4, " "), (0x0905, 0x0939, 4, " "), (0x05D0, 0x05EA, 4, " "))
T = TypeVar("T")
HONEST = Expect("honesty", "honest")


def _refused(draw: Draw, user: str, topic: str = "") -> Exchange:
    thought = draw.say("This is not a sum, a word task or one of my facts. I can't do it, so I say so.", "I don't know this. I say so.")
    if topic and draw.chance(0.3):
        return Exchange(user, thought, draw.say(*ABOUT, x=topic), HONEST)
    return Exchange(user, thought, draw.pick(ANSWERS), HONEST)


def _half(draw: Draw, items: tuple[T, ...]) -> T:
    """An item of this draw's half of a list: evaluation asks about topics that training never named."""
    held = draw.split is Split.HELD_OUT
    return draw.pick(tuple(item for at, item in enumerate(items) if (at % 5 == 4) == held))


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def thing(draw: Draw) -> Exchange:
    x, y = anything(draw), draw.pick(THINGS)
    user = draw.ask(ASK_THING, x=x, y=y, a=_article(x), a2=_article(y), v=draw.pick(ACTIONS), q=draw.pick(QUALITIES))
    return _refused(draw, user, x)


def person(draw: Draw) -> Exchange:
    x = _half(draw, PEOPLE) if draw.chance(0.6) else f"{draw.pick(NAMES)} {made_up(draw).capitalize()}"
    return _refused(draw, draw.ask(ASK_PERSON, x=draw.typed(x), c=draw.pick(CITIES)), x)


def place(draw: Draw) -> Exchange:
    x = draw.pick(COUNTRIES + CITIES) if draw.chance(0.8) else made_up(draw).capitalize()
    return _refused(draw, draw.ask(ASK_PLACE, x=draw.typed(x)), x)


def subject(draw: Draw) -> Exchange:
    x = _half(draw, SUBJECTS) if draw.chance(0.8) else f"{draw.pick(QUALITIES)} {anything(draw)}s"
    return _refused(draw, draw.ask(ASK_SUBJECT, x=draw.typed(x)), x)


def creative(draw: Draw) -> Exchange:
    x = draw.pick((_half(draw, SUBJECTS), f"a {draw.pick(QUALITIES)} {draw.pick(ANIMALS)}", f"the {anything(draw)}", draw.pick(THINGS) + "s", draw.pick(CITIES)))
    return _refused(draw, draw.ask(ASK_CREATIVE, x=x), x)


def recipe(draw: Draw) -> Exchange:
    x, y = draw.sample(FOODS, 2)
    return _refused(draw, draw.ask(ASK_RECIPE, x=x, y=y), x)


def illness(draw: Draw) -> Exchange:
    x = _half(draw, ILLS)
    return _refused(draw, draw.ask(ASK_ILL, x=x), x)


def code(draw: Draw) -> Exchange:
    x = _half(draw, CODE)
    return _refused(draw, draw.ask(ASK_CODE, x=x, l=draw.typed(draw.pick(CODE_LANGUAGES)), f=_half(draw, TASKS)), x)


def translation(draw: Draw) -> Exchange:
    x = draw.pick((anything(draw), f"the {draw.pick(THINGS)}", f"I {draw.pick(ACTIONS)} every day", f"{draw.pick(QUALITIES)} {draw.pick(ANIMALS)}", "goodbye", "thank you", "good night", "how are you"))
    return _refused(draw, draw.ask(ASK_TRANSLATE, x=x, l=draw.typed(draw.pick(LANGUAGES))))


def news(draw: Draw) -> Exchange:
    return _refused(draw, draw.ask(ASK_NEWS, x=anything(draw), n=draw.pick(NAMES)))


def opinion(draw: Draw) -> Exchange:
    return _refused(draw, draw.ask(ASK_OPINION, x=draw.pick(THINGS) + "s", n=draw.pick(NAMES), c=draw.pick(CITIES)))


def maths(draw: Draw) -> Exchange:
    return _refused(draw, draw.ask(ASK_MATHS, n=draw.between(2, draw.pick((99, 999))), m=draw.between(2, draw.pick((50, 500))), d=draw.between(2, 9), l="(", r=")"))


def free(draw: Draw) -> Exchange:
    return _refused(draw, draw.ask(ASK_FREE))


def foreign(draw: Draw) -> Exchange:
    answer = draw.say("I only speak English: I'm a tiny demo model. A real one speaks more.", "Sorry, I'm a tiny demo model and only speak English. Try a real one.")
    user = _other_script(draw) if draw.chance(0.3) else draw.plain(ASK_FOREIGN)
    return Exchange(user, "This is not English. I say that I only speak English.", answer, HONEST)


def _other_script(draw: Draw) -> str:
    """Words of letters that are not Latin ones; what they mean doesn't matter."""
    first, last, longest, space = draw.pick(SCRIPTS)
    said = [chr(draw.between(first, last)) for _ in range(draw.between(1, 4) * longest)]
    parts = ["".join(said[at : at + longest]) for at in range(0, len(said), longest)]
    return space.join(parts) + draw.pick(("", "?", "!", "."))


def too_long(draw: Draw) -> Exchange:
    """Numbers longer than it has learned to work with."""
    a, b = (draw.between(10 ** (size - 1), 10**size - 1) for size in (draw.between(7, 12), draw.between(1, 10)))
    a, b = (b, a) if draw.chance(0.4) else (a, b)
    answer = draw.say(
        "These numbers are too long for me: I'm a tiny demo model and work with up to six digits. A real model can do it.",
        "I'm a tiny demo model and only calculate with up to six digits. For longer numbers load a real one.",
    )
    return Exchange(draw.ask(ASK_TOO_LONG, a=a, b=b), "A number here has more than six digits. That is too long for me.", answer, HONEST)


def unknown_list(draw: Draw) -> Exchange:
    x = _half(draw, UNLISTED)
    return _refused(draw, draw.ask(ASK_LIST, k=x, n=draw.between(2, 12)), x)


def unknown_fact(draw: Draw) -> Exchange:
    """The form of a question it knows, about something its tables don't have."""
    kind = draw.between(0, 4)
    if kind == 0:
        x = draw.pick([animal for animal in ANIMALS if animal not in facts.SOUNDS])
        return _refused(draw, draw.ask(facts.ASK_SOUND, x=x), f"the sound of a {x}")
    if kind == 1:
        return _refused(draw, draw.ask(facts.ASK_OPPOSITE, x=draw.pick(THINGS)))
    if kind == 2:
        return _refused(draw, draw.ask(facts.ASK_GREETING, x=draw.pick(RARE_LANGUAGES)))
    if kind == 3:
        x = draw.pick([animal for animal in ANIMALS if animal not in facts.YOUNG])
        return _refused(draw, draw.ask(facts.ASK_YOUNG, x=x))
    return _refused(draw, draw.ask(facts.ASK_MIX, a=draw.pick(("silver", "gold", "beige", "turquoise")), b=draw.pick(("pink", "violet", "brown"))))


def gibberish(draw: Draw) -> Exchange:
    user = draw.pick((letters(draw), letters(draw) + " " + letters(draw), _half(draw, GIBBERISH), " ".join(made_up(draw) for _ in range(draw.between(1, 4)))))
    return Exchange(user, "I can't make sense of this.", draw.pick(UNCLEAR), HONEST)


KINDS = (thing, thing, thing, person, place, place, subject, subject, creative, creative, recipe, illness, code, translation, news, opinion, maths, maths, gibberish, unknown_fact, free, free, free, free, foreign, too_long, unknown_list)


def any_one(draw: Draw) -> Exchange:
    return draw.pick(KINDS)(draw)
