"""Questions about pictures and sounds, each with the thought that finds the answer in what is seen or heard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from training import digits
from training.conversations import Exchange, Expect, Sample, conversation
from training.mixture import filler, weighted, without_thinking
from training.omni import features, pictures, scenes, speech
from training.omni.features import Medium
from training.omni.scenes import COLOURS, SHAPES, Scene, Thing
from training.omni.tokens import PICTURE_PART, SOUND_PART
from training.phrasings import Draw
from training.words import ANIMALS, THINGS, in_words
from training.words import word as any_word

SPOKEN_WORDS = tuple(sorted({*SHAPES, *ANIMALS, *THINGS} - {*COLOURS}))
_FROM = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "centre": "in the centre",
}
_RELATIONS = {
    "left of": (0, -1),
    "to the left of": (0, -1),
    "right of": (0, 1),
    "to the right of": (0, 1),
    "above": (1, -1),
    "below": (1, 1),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """An exchange whose question is about media; they stand before the question, or after it."""

    exchange: Exchange
    media: tuple[Medium, ...]
    again: tuple[Callable[[Draw], Exchange], ...] = ()
    """Other questions about the same media."""


@dataclass(frozen=True, slots=True)
class MediaSample:
    """A sample with the media of its parts, in their order."""

    sample: Sample
    media: tuple[Medium, ...]


def at(place: str) -> str:
    return _FROM.get(place, f"at the {place}")


def article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def listed(things: tuple[Thing, ...]) -> str:
    return ", ".join(f"{thing.name} {at(thing.place)}" for thing in things)


def overview(things: tuple[Thing, ...]) -> str:
    return f"I see {listed(things)}."


def _enumerated(things: tuple[Thing, ...]) -> str:
    return "\n".join(f"{number}: {thing.name} {at(thing.place)}" for number, thing in enumerate(things, 1))


def shown(draw: Draw, scene: Scene, ask: Callable[[Draw, Scene], Exchange]) -> Shown:
    return Shown(ask(draw, scene), _drawn(draw, scene))


def _drawn(draw: Draw, scene: Scene) -> tuple[Medium, ...]:
    return (features.picture(pictures.draw_scene(draw, scene)),)


def colour_of(draw: Draw, scene: Scene) -> Exchange:
    """The colour of the only thing, or of one whose shape stands alone."""
    alone = len(scene.things) == 1
    found = draw.pick(_unique(scene, lambda thing: thing.shape))
    user = draw.ask("sight/colour") if alone else draw.ask("sight/colour_of", s=found.shape)
    answer = draw.say(
        "{C}.", "It's {c}.", "The {s} is {c}.", "It is {c}.", C=found.colour.capitalize(), c=found.colour, s=found.shape
    )
    thought = overview(scene.things) + f" The {found.shape} is {found.colour}."
    return Exchange(user, thought, answer, Expect("colour", "has_word_any_case", found.colour))


def shape_of(draw: Draw, scene: Scene) -> Exchange:
    alone = len(scene.things) == 1
    found = draw.pick(_unique(scene, lambda thing: thing.colour))
    user = draw.ask("sight/shape") if alone else draw.ask("sight/shape_of", c=found.colour)
    answer = draw.say("It's a {s}.", "A {s}.", "The {c} shape is a {s}.", "It is a {s}.", s=found.shape, c=found.colour)
    thought = overview(scene.things) + f" The {found.colour} one is a {found.shape}."
    return Exchange(user, thought, answer, Expect("shape", "has_word_any_case", found.shape))


def whole(draw: Draw, scene: Scene) -> Exchange:
    """Everything that is in the picture."""
    names = [article(thing.name) for thing in scene.things]
    said = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    answer = draw.say("I see {x}.", "There is {x}.", "The picture shows {x}.", x=said)
    return Exchange(
        draw.ask("sight/both"), overview(scene.things), answer, Expect("whole pictures", "contains_all", names)
    )


def count(draw: Draw, scene: Scene) -> Exchange:
    """How many there are, of all or of one kind."""
    kind = draw.random.random()
    one = draw.pick(scene.things)
    if kind < 0.4:
        chosen, user, named = scene.things, draw.ask("sight/count"), "shape"
    else:
        if kind < 0.65:
            shape = draw.pick(SHAPES) if draw.chance(0.06) else one.shape
            chosen, named = tuple(t for t in scene.things if t.shape == shape), shape
        elif kind < 0.85:
            chosen, named = tuple(t for t in scene.things if t.colour == one.colour), f"{one.colour} shape"
        else:
            chosen, named = tuple(t for t in scene.things if t.name == one.name), one.name
        user = draw.ask("sight/count_some", s=_plural(named))
    number = len(chosen)
    thought = f"{_enumerated(scene.things)}\n"
    if kind >= 0.4:
        thought += (
            f"Of these, {_plural(named)}:\n{_enumerated(chosen)}\n" if chosen else f"None of these is a {named}.\n"
        )
    thought += f"So {number}."
    answer = draw.say(
        "{n}.",
        "There {are} {n}.",
        "I count {n}.",
        "There {are} {n} {x}.",
        n=number,
        are="is" if number == 1 else "are",
        x=named if number == 1 else _plural(named),
    )
    return Exchange(user, thought, answer, Expect("counts", "first_number", str(number)))


def _plural(named: str) -> str:
    return named + ("es" if named.endswith("s") else "s")


def place(draw: Draw, scene: Scene) -> Exchange:
    """Where something is, what is somewhere, or whether one thing is on a given side of another."""
    unique = _unique(scene, lambda thing: thing.name)
    pairs = [(a, b) for a in unique for b in unique if a.cell % 3 != b.cell % 3 and a.cell // 3 != b.cell // 3]
    kind = draw.random.random()
    if pairs and kind < 0.35:
        return _relation(draw, scene, *draw.pick(pairs))
    found = draw.pick(unique)
    if kind > 0.8:
        user = draw.ask("sight/at_place", p=at(found.place))
        thought = overview(scene.things) + f" {at(found.place).capitalize()}: {found.name}."
        answer = draw.say(
            "A {n}.".replace("A", "{A}"),
            "It's {a} {n}.",
            "{A} {n} is there.",
            A=article(found.name).split()[0].capitalize(),
            a=article(found.name).split()[0],
            n=found.name,
        )
        return Exchange(user, thought, answer, Expect("places", "contains_any_case", found.name))
    named = _short_name(draw, scene, found)
    thought = overview(scene.things) + f" The {found.name} is {at(found.place)}."
    answer = draw.say(
        "It's {p}.", "{P}.", "The {n} is {p}.", p=at(found.place), P=at(found.place).capitalize(), n=named
    )
    return Exchange(draw.ask("sight/place", s=named), thought, answer, Expect("places", "place", found.place))


def _short_name(draw: Draw, scene: Scene, found: Thing) -> str:
    if sum(thing.shape == found.shape for thing in scene.things) == 1 and draw.chance(0.6):
        return found.shape
    return found.name


def _relation(draw: Draw, scene: Scene, a: Thing, b: Thing) -> Exchange:
    said = draw.pick(tuple(_RELATIONS))
    axis, sign = _RELATIONS[said]
    apart = (a.cell % 3 - b.cell % 3) if axis == 0 else (a.cell // 3 - b.cell // 3)
    true = apart * sign > 0
    words = ("right of" if apart > 0 else "left of") if axis == 0 else ("below" if apart > 0 else "above")
    first, second = _short_name(draw, scene, a), _short_name(draw, scene, b)
    thought = overview(scene.things) + f" The {a.name} is {at(a.place)}, the {b.name} {at(b.place)}: {words} it."
    answer = f"{'Yes' if true else 'No'}, the {first} is {words} the {second}."
    return Exchange(
        draw.ask("sight/relation", a=first, r=said, b=second),
        thought,
        answer,
        Expect("places", "starts_with", "Yes" if true else "No"),
    )


def _unique(scene: Scene, key: Callable[[Thing], str]) -> tuple[Thing, ...]:
    keys = [key(thing) for thing in scene.things]
    return tuple(thing for thing in scene.things if keys.count(key(thing)) == 1)


def single(draw: Draw) -> Shown:
    scene = scenes.large_thing(draw) if draw.chance(0.5) else scenes.scene(draw, 1)
    ask = draw.pick((colour_of, shape_of, shape_of, colour_of, whole))
    others = tuple(_about(scene, other) for other in (colour_of, shape_of, place) if other is not ask)
    return Shown(ask(draw, scene), _drawn(draw, scene), others)


def several(draw: Draw) -> Shown:
    """Colours and shapes among others."""
    scene = scenes.different_things(draw, draw.between(2, 4))
    ask = draw.pick((colour_of, shape_of, whole)) if len(scene.things) < 4 else draw.pick((colour_of, shape_of))
    others = tuple(_about(scene, other) for other in (colour_of, shape_of, count, place) if other is not ask)
    return Shown(ask(draw, scene), _drawn(draw, scene), others)


def counted(draw: Draw) -> Shown:
    scene = scenes.scene(draw, draw.between(1, 6))
    others = (_about(scene, place),) if _unique(scene, lambda thing: thing.name) else ()
    return Shown(count(draw, scene), _drawn(draw, scene), (*others, _about(scene, count)))


def placed(draw: Draw) -> Shown:
    while not _unique(scene := scenes.scene(draw, draw.between(1, 5)), lambda thing: thing.name):
        pass
    return Shown(place(draw, scene), _drawn(draw, scene), (_about(scene, place), _about(scene, count)))


def _about(scene: Scene, ask: Callable[[Draw, Scene], Exchange]) -> Callable[[Draw], Exchange]:
    return lambda draw: ask(draw, scene)


def _number_answer(draw: Draw, number: int) -> str:
    return draw.say("{n}.", "It's {n}.", "The number is {n}.", "That's {n}.", n=number)


def _read_number(draw: Draw, number: int) -> Exchange:
    thought = f"I see the digits {digits.spaced(str(number))}: {number}."
    return Exchange(
        draw.ask("sight/number"),
        thought,
        _number_answer(draw, number),
        Expect("drawn numbers", "last_number", str(number)),
    )


def _hear_number(draw: Draw, number: int) -> Exchange:
    thought = f"I hear {in_words(number)}: {number}."
    return Exchange(
        draw.ask("sound/number"),
        thought,
        _number_answer(draw, number),
        Expect("spoken numbers", "last_number", str(number)),
    )


def _number(draw: Draw) -> int:
    return draw.between(10, 99) if draw.chance(0.8) else draw.between(0, 19)


def _draw_text(draw: Draw, text: str) -> tuple[Medium, ...]:
    return (features.picture(pictures.draw_writing(draw, scenes.writing(draw, text))),)


def _speak(draw: Draw, words: str) -> tuple[Medium, ...]:
    return (features.sound(speech.recorded(draw, speech.spoken(draw, words))[: 4 * features.RATE]),)


def drawn_number(draw: Draw, number: int | None = None) -> Shown:
    number = _number(draw) if number is None else number
    return Shown(
        _read_number(draw, number), _draw_text(draw, str(number)), (lambda draw: _computed(draw, number, "sight"),)
    )


def spoken_number(draw: Draw, number: int | None = None) -> Shown:
    number = _number(draw) if number is None else number
    lead = draw.pick(("the number ", "number ", "it is ", "I say ")) if draw.chance(0.1) else ""
    return Shown(
        _hear_number(draw, number),
        _speak(draw, lead + in_words(number)),
        (lambda draw: _computed(draw, number, "sound"),),
    )


def _computed(draw: Draw, number: int, sense: str, add: int = 0) -> Exchange:
    """The number with another one added, `add` if it is given, or taken away."""
    other = add or (5 if draw.chance(0.25) else draw.between(1, 20) if draw.chance(0.8) else draw.between(21, 99))
    plus = bool(add) or draw.chance(0.75) or number < other
    thought, result = digits.add(number, other) if plus else digits.subtract(number, other)
    said = in_words(other) if add or draw.chance(0.6) else str(other)
    user = draw.ask(f"{sense}/{'plus' if plus else 'minus'}", n=said)
    seen = (
        f"I see the digits {digits.spaced(str(number))}: {number}."
        if sense == "sight"
        else f"I hear {in_words(number)}: {number}."
    )
    answer = draw.say(
        "{r}.", "It's {r}.", "{a} {o} {b} = {r}.", "That's {r}.", r=result, a=number, o="+" if plus else "-", b=other
    )
    return Exchange(user, f"{seen}\n{thought}", answer, Expect("this plus five", "last_number", str(result)))


def drawn_sum(draw: Draw, number: int | None = None, add: int = 0) -> Shown:
    number = _number(draw) if number is None else number
    return Shown(
        _computed(draw, number, "sight", add), _draw_text(draw, str(number)), (lambda draw: _read_number(draw, number),)
    )


def spoken_sum(draw: Draw, number: int | None = None, add: int = 0) -> Shown:
    number = _number(draw) if number is None else number
    return Shown(
        _computed(draw, number, "sound", add),
        _speak(draw, in_words(number)),
        (lambda draw: _hear_number(draw, number),),
    )


def asked_aloud(draw: Draw) -> Shown:
    """The whole sum is spoken."""
    number, other, plus = draw.between(0, 99), draw.between(1, 20), draw.chance(0.7)
    number, other = (number, other) if plus else (max(number, other), min(number, other))
    thought, result = digits.add(number, other) if plus else digits.subtract(number, other)
    words = f"{in_words(number)} {'plus' if plus else 'minus'} {in_words(other)}"
    lead = "what is " if draw.chance(0.5) else ""
    sign = "+" if plus else "-"
    answer = draw.say("{r}.", "It's {r}.", "{a} {o} {b} = {r}.", "That's {r}.", r=result, a=number, o=sign, b=other)
    thought = f"I hear {words}: {number}{sign}{other}.\n{thought}"
    expect = Expect("sums asked aloud", "last_number", str(result))
    return Shown(Exchange(draw.ask("sound/sum"), thought, answer, expect), _speak(draw, lead + words))


def drawn_word(draw: Draw) -> Shown:
    while not 2 <= len(text := any_word(draw)) <= 7 or not text.isalpha() or not text.isascii():
        pass
    text = text.lower()
    written = draw.pick((text, text, text.upper(), text.capitalize()))
    answer = draw.say("{w}.", "It says {w}.", "The word is {w}.", w=written)
    thought = f"I see the letters {digits.spaced(written)}: {written}."
    exchange = Exchange(draw.ask("sight/word"), thought, answer, Expect("drawn words", "has_word", written))
    return Shown(exchange, _draw_text(draw, written))


def spoken_word(draw: Draw) -> Shown:
    text = draw.pick(SPOKEN_WORDS)
    answer = draw.say("{W}.", "I hear {w}.", "The word is {w}.", w=text, W=text.capitalize())
    exchange = Exchange(
        draw.ask("sound/word"), f"I hear the word {text}.", answer, Expect("spoken words", "has_word_any_case", text)
    )
    return Shown(exchange, _speak(draw, text))


def spoken_colour(draw: Draw) -> Shown:
    name = draw.pick(tuple(COLOURS))
    bank = "sound/colour" if draw.chance(0.8) else "sound/word"
    answer = draw.say("{C}.", "I hear {c}.", "It's {c}.", c=name, C=name.capitalize())
    thought = f"I hear the {'word' if bank.endswith('word') else 'colour'} {name}."
    return Shown(
        Exchange(draw.ask(bank), thought, answer, Expect("spoken colours", "has_word_any_case", name)),
        _speak(draw, name),
    )


def same_number(draw: Draw) -> Shown:
    """A picture and a sound at once."""
    seen = _number(draw)
    heard = seen if draw.chance(0.5) else _number(draw)
    media = (*_draw_text(draw, str(seen)), *_speak(draw, in_words(heard)))
    thought = f"I see the digits {digits.spaced(str(seen))}: {seen}. I hear {in_words(heard)}: {heard}."
    answer = f"Yes, both are {seen}." if seen == heard else f"No, I see {seen} and hear {heard}."
    exchange = Exchange(
        draw.ask("sound/same"), thought, answer, Expect("picture and sound", "starts_with", answer.split(",")[0])
    )
    return Shown(exchange, media)


KINDS: tuple[tuple[float, Callable[[Draw], Shown]], ...] = (
    (0.07, single),
    (0.10, several),
    (0.13, counted),
    (0.13, placed),
    (0.09, drawn_number),
    (0.05, drawn_sum),
    (0.06, drawn_word),
    (0.16, spoken_number),
    (0.06, spoken_sum),
    (0.04, asked_aloud),
    (0.05, spoken_word),
    (0.03, spoken_colour),
    (0.03, same_number),
)


def with_parts(draw: Draw, about: Shown) -> Exchange:
    """The exchange with its media in the question: before the text, or after it."""
    parts = "".join(PICTURE_PART if isinstance(medium, features.Picture) else SOUND_PART for medium in about.media)
    user = about.exchange.user
    return replace(about.exchange, user=parts + user if draw.chance(0.75) else user + parts)


def sample_of(draw: Draw, about: Shown) -> MediaSample:
    """The question alone, after other talk, or after another question about the same media."""
    if about.again and draw.chance(0.25):
        first = replace(about, exchange=draw.pick(about.again)(draw))
        return MediaSample(conversation(with_parts(draw, first), about.exchange), about.media)
    before = [filler(draw)] if draw.chance(0.06) else []
    return MediaSample(conversation(*before, with_parts(draw, about)), about.media)


def media_samples(draw: Draw) -> list[MediaSample]:
    """One picture or sound with the question about it, and sometimes with another one as a sample of its own."""
    about = weighted(draw, KINDS)(draw)
    found = [sample_of(draw, about)]
    if about.again and draw.chance(0.6):
        found.append(sample_of(draw, replace(about, exchange=draw.pick(about.again)(draw))))
    return [replace(one, sample=without_thinking(one.sample)) if draw.chance(0.15) else one for one in found]
