"""What the user said earlier: names, favourites, numbers, and corrections of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.conversations import Exchange, Expect
from training.phrasings import Draw
from training.words import ANIMALS, CITIES, COLOURS, FOODS, THINGS, anything, name

TELL_NAME = "memory/tell_name"
ASK_NAME = "memory/name"
FIX_NAME = "memory/fix_name"
TELL = "memory/tell"
ASK = "memory/ask"
SYSTEM = "memory/system"
FIX = "memory/fix"
FIX_AT_ONCE = "memory/fix_at_once"
WORD_KEYS = (
    "favourite word", "code word", "dog's name", "cat's name", "sister's name", "brother's name", "best friend's name", "teacher's name", "boat's name",
    "team's name", "street", "password for the game", "horse's name", "nickname", "project's name", "username", "company", "car's name", "robot's name",
)
STATED = ("age", "city", "job", "like", "pet")
RECALLED = {
    "age": ("You are {v} years old.", "You're {v}.", "{v}, you said."),
    "city": ("You live in {v}.", "In {v}.", "You told me: {v}."),
    "job": ("You work as a {v}.", "You're a {v}.", "You told me: {v}."),
    "like": ("You like {v}.", "You told me that you like {v}.", "{v}, you said."),
    "pet": ("Your dog is called {v}.", "It's {v}.", "You told me: {v}."),
}
NOTED = {
    "age": ("OK, you are {v} years old.", "{v} is a fine age! I'll remember it.", "Noted: you are {v}."),
    "city": ("OK, you live in {v}.", "{v} sounds nice! I'll remember it.", "Noted: you live in {v}."),
    "job": ("OK, you work as a {v}.", "Good to know that you are a {v}.", "A {v}! I'll remember that."),
    "like": ("Good to know that you like {v}!", "I'll remember that you like {v}.", "OK, you like {v}."),
    "pet": ("OK, your dog is called {v}.", "Say hello to {v}! I'll remember the name.", "Noted: your dog is {v}."),
}
NUMBER_KEYS = (
    "lucky number", "favourite number", "room number", "house number", "locker number", "bus number", "seat number", "ticket number", "shoe size",
    "order number", "flight number", "badge number", "player number",
)
LIST_KEYS = {
    "favourite colour": COLOURS, "favorite color": COLOURS, "favourite food": FOODS, "favourite animal": ANIMALS, "home town": CITIES, "favourite fruit": FOODS[7:18],
    "favorite food": FOODS, "favourite pet": ANIMALS, "favourite city": CITIES, "favourite thing": THINGS, "breakfast": FOODS, "hobby": ("chess", "sailing", "knitting", "running", "painting", "gardening", "cooking", "climbing", "reading", "swimming", "cycling", "fishing"),
    "job": ("baker", "teacher", "nurse", "pilot", "farmer", "writer", "plumber", "doctor", "driver", "singer", "painter", "engineer"),
    "favourite season": ("spring", "summer", "autumn", "winter"), "favourite day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
}


@dataclass(frozen=True, slots=True)
class Note:
    """Something the user tells: under which name, and its value."""

    key: str
    value: str


def value_of(draw: Draw, key: str) -> str:
    if key in STATED:
        return _stated(draw, key)
    if key == "name" or key.endswith("name"):
        return name(draw).lower() if draw.chance(0.08) else name(draw)
    if key in NUMBER_KEYS:
        return str(draw.between(1, draw.pick((99, 999, 9999))))
    if key in LIST_KEYS and draw.chance(0.8):
        return draw.pick(LIST_KEYS[key])
    return anything(draw)


def _stated(draw: Draw, key: str) -> str:
    if key == "age":
        return str(draw.between(5, 99))
    if key == "like":
        return draw.pick(FOODS) if draw.chance(0.5) else draw.pick(ANIMALS) + "s"
    if key == "pet":
        return name(draw)
    return draw.typed(draw.pick(CITIES)) if key == "city" else draw.pick(LIST_KEYS["job"])


def key(draw: Draw) -> str:
    kind = draw.random.random()
    if draw.chance(0.2):
        return draw.pick(STATED)
    if kind < 0.25:
        return "name"
    return draw.pick(WORD_KEYS if kind < 0.5 else NUMBER_KEYS if kind < 0.7 else tuple(k for k in LIST_KEYS if k not in STATED))


def tell(draw: Draw, note: Note) -> Exchange:
    k, v = note.key, note.value
    if k == "name":
        answer = draw.say("Nice to meet you, {v}!", "Hello, {v}!", "Hi {v}! I'll remember your name.", "Pleased to meet you, {v}.", v=v)
        return Exchange(draw.plain(TELL_NAME, v=v), f"The user's name is {v}.", answer)
    if k in STATED:
        return Exchange(draw.plain(f"memory/tell_{k}", v=v), f"The user's {k} is {v}.", draw.say(*NOTED[k], v=v))
    answer = draw.say("OK, your {k} is {v}.", "I'll remember that: {v}.", "Noted: your {k} is {v}.", "Good to know! Your {k} is {v}.", k=k, v=v)
    return Exchange(draw.plain(TELL, k=k, v=v), f"The user's {k} is {v}.", answer)


def correct(draw: Draw, old: Note, value: str, at_once: bool) -> Exchange:
    if at_once and draw.chance(0.6):
        user = draw.plain(FIX_AT_ONCE, v=value, o=old.value)
    elif old.key == "name":
        user = draw.plain(FIX_NAME, v=value, o=old.value)
    elif old.key in STATED:
        user = draw.plain(FIX_AT_ONCE, v=value, o=old.value)
    else:
        user = draw.plain(FIX, k=old.key, v=value, o=old.value)
    if old.key in STATED:
        return Exchange(user, f"A correction: the user's {old.key} is {value}, not {old.value}.", draw.say(*NOTED[old.key], v=value))
    answer = draw.say("Thanks for the correction: your {k} is {v}.", "I see, {v} it is.", "Sorry! Your {k} is {v}.", "OK, {v}, not {o}.", k=old.key, v=value, o=old.value)
    return Exchange(user, f"A correction: the user's {old.key} is {value}, not {old.value}.", answer)


def _asked(draw: Draw, k: str) -> str:
    if k in STATED:
        return draw.ask(f"memory/ask_{k}")
    return draw.ask(ASK_NAME) if k == "name" else draw.ask(ASK, k=k)


def recall(draw: Draw, note: Note) -> Exchange:
    k, v = note.key, note.value
    answer = draw.say(*RECALLED.get(k, ("Your {k} is {v}.", "It's {v}.", "{v}.", "You told me: {v}.")), k=k, v=v)
    user = _asked(draw, k)
    return Exchange(user, f"The user told me that the {k} is {v}.", answer, Expect("memory over 8 turns", "has_word", v))


def unknown(draw: Draw, k: str) -> Exchange:
    if k in STATED:
        answer = draw.say("I don't know: you haven't told me.", "You haven't told me that yet.")
    else:
        answer = draw.say("You haven't told me your {k} yet.", "I don't know your {k}: you haven't told me.", k=k)
    user = _asked(draw, k)
    return Exchange(user, f"The user has not told me the {k}.", answer, Expect("asked, never told", "contains", "told me"))


def remembered(draw: Draw, filler: Callable[[Draw], Exchange], fillers: int) -> list[Exchange]:
    """A conversation in which things are told, other talk goes on, and at last one of them is asked for."""
    notes: dict[str, str] = {}
    turns: list[Exchange] = []
    for _ in range(draw.between(1, 3)):
        _tell_one(draw, notes, turns)
    for _ in range(fillers):
        turns.append(filler(draw) if draw.chance(0.9) else _aside(draw, notes))
    if draw.chance(0.2) and (fixable := [k for k in notes if k not in STATED]):
        k = draw.pick(fixable)
        turns.insert(draw.between(len(turns) - fillers, len(turns)), _corrected(draw, notes, k, False))
    wanted = draw.pick(tuple(notes))
    return [*turns, recall(draw, Note(wanted, notes[wanted]))]


def _aside(draw: Draw, notes: dict[str, str]) -> Exchange:
    k = draw.pick(tuple(notes))
    return recall(draw, Note(k, notes[k]))


def _tell_one(draw: Draw, notes: dict[str, str], turns: list[Exchange]) -> None:
    k = key(draw)
    if k in notes:
        return
    notes[k] = value_of(draw, k)
    turns.append(tell(draw, Note(k, notes[k])))
    if draw.chance(0.15):
        turns.append(_corrected(draw, notes, k, True))


def _corrected(draw: Draw, notes: dict[str, str], k: str, at_once: bool) -> Exchange:
    old = Note(k, notes[k])
    notes[k] = value_of(draw, k)
    return correct(draw, old, notes[k], at_once)


def from_system(draw: Draw) -> tuple[str, Exchange]:
    """What the system prompt says of the user can be asked for, too."""
    k = key(draw)
    note = Note(k, value_of(draw, k))
    return draw.plain(SYSTEM, k=k, v=note.value), recall(draw, note)


def never_told(draw: Draw, filler: Callable[[Draw], Exchange]) -> list[Exchange]:
    k, other = key(draw), key(draw)
    turns = [tell(draw, Note(other, value_of(draw, other)))] if other != k and draw.chance(0.5) else []
    return [*turns, *(filler(draw) for _ in range(draw.between(0, 3))), unknown(draw, k)]
