"""System prompts: a name, a manner of answering, a forbidden word; and the everyday ones that ask for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from training.abilities import arithmetic, facts, honesty, palaver, small_talk
from training.conversations import Exchange, Expect
from training.phrasings import Draw
from training.words import anything, name

EVERYDAY = "manners/everyday"
PERSONAS = ("You are a helpful assistant. ", "You are Sprout. ", "You are a chat assistant. ", "You help the user. ", "", "", "", "", "Be kind. ", "You are an assistant in Palaver. ")
CAPITALS = "manners/capitals"
LOWER = "manners/lower"
ONE_WORD = "manners/one_word"
JSON_KEYS = "manners/json_keys"
BULLETS = "manners/bullets"
FORBIDDEN = "manners/forbidden"
NAMED = "manners/named"
ENDING = "manners/ending"
STARTING = "manners/starting"
ASK_WHO = "manners/who"
ANSWER_KEYS = ("answer", "result", "reply", "value", "output", "response", "solution")
REASON_KEYS = ("reason", "thought", "why", "explanation", "note", "comment")
KIND_KEYS = ("type", "kind", "topic", "category")
SECOND = ("That is my answer.", "I thought about it first.", "I worked it out step by step.", "It was a small question.", "I hope that is right.")
THIRD = ("Ask me more if you like.", "I'm happy to help.", "What is your next question?", "Tell me if you need more.", "That's all.")

Restyle: TypeAlias = Callable[[Exchange], Exchange]


@dataclass(frozen=True, slots=True)
class Manner:
    """A system prompt and what it makes of an ordinary exchange."""

    prompt: str
    question: Callable[[Draw], Exchange]
    restyle: Restyle


def short_fact(draw: Draw) -> Exchange:
    """A question whose answer is one word or one number."""
    while True:
        kind = draw.random.random()
        found = arithmetic.sum_(draw, 3) if kind < 0.2 else arithmetic.difference(draw, 3) if kind < 0.3 else facts.any_one(draw)
        if found.expect and isinstance(found.expect.value, str) and " " not in found.expect.value:
            return found


def _short(exchange: Exchange) -> str:
    assert exchange.expect is not None
    value = str(exchange.expect.value)
    return value if value[0].isdigit() or value[0] == "-" else value[0].upper() + value[1:]


def _any_question(draw: Draw) -> Exchange:
    return draw.pick((short_fact, short_fact, small_talk.any_one, palaver.any_one, honesty.any_one))(draw)


def capitals(draw: Draw) -> Manner:
    def restyle(exchange: Exchange) -> Exchange:
        return Exchange(exchange.user, exchange.thinking + "\nIn capitals.", exchange.answer.upper(), Expect("system manners", "capitals"))

    return Manner(draw.plain(CAPITALS), _any_question, restyle)


def lower(draw: Draw) -> Manner:
    def restyle(exchange: Exchange) -> Exchange:
        return Exchange(exchange.user, exchange.thinking + "\nIn lower case.", exchange.answer.lower(), Expect("system manners", "lower"))

    return Manner(draw.plain(LOWER), _any_question, restyle)


def one_word(draw: Draw) -> Manner:
    def restyle(exchange: Exchange) -> Exchange:
        short = _short(exchange)
        return Exchange(exchange.user, exchange.thinking + f"\nOne word: {short}", short, Expect("system manners", "one_word", short))

    return Manner(draw.plain(ONE_WORD), short_fact, restyle)


def json_keys(draw: Draw) -> Manner:
    keys = _keys(draw)

    def restyle(exchange: Exchange) -> Exchange:
        filled = {key: _json_value(key, exchange) for key in keys}
        thought = exchange.thinking + f"\nAs JSON with the keys {', '.join(keys)}."
        return Exchange(exchange.user, thought, json.dumps(filled, ensure_ascii=False), Expect("system manners", "json_keys", keys))

    quote = draw.pick(('"{}"', "{}", "'{}'", "`{}`"))
    listed = [quote.format(key) for key in keys]
    return Manner(draw.plain(JSON_KEYS, k=listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + " and " + listed[-1]), short_fact, restyle)


def _keys(draw: Draw) -> list[str]:
    keys = [draw.pick(ANSWER_KEYS)]
    if draw.chance(0.5):
        keys.append(draw.pick(REASON_KEYS))
    if draw.chance(0.3):
        keys.append(draw.pick(KIND_KEYS))
    if draw.chance(0.35) or len(keys) == 1:
        keys.append(anything(draw))
    draw.random.shuffle(keys)
    return list(dict.fromkeys(keys))


def _json_value(key: str, exchange: Exchange) -> str:
    if key in REASON_KEYS:
        return "I worked it out."
    if key in KIND_KEYS:
        return "sum" if exchange.expect and exchange.expect.bar.startswith("sums") else "fact"
    return _short(exchange)


def bullets(draw: Draw) -> Manner:
    def restyle(exchange: Exchange) -> Exchange:
        answer = f"- {exchange.answer}\n- {draw.pick(SECOND)}\n- {draw.pick(THIRD)}"
        return Exchange(exchange.user, exchange.thinking + "\nIn three bullets.", answer, Expect("system manners", "bullets", 3))

    return Manner(draw.plain(BULLETS), _any_question, restyle)


def forbidden(draw: Draw) -> Manner:
    question = draw.pick((short_fact, small_talk.hello, small_talk.how_are_you, small_talk.thanks, small_talk.bye))
    likely = re.findall(r"[A-Za-z]{3,}", question(draw).answer) or ["the"]
    word = draw.pick(likely).lower() if draw.chance(0.8) else anything(draw)

    def restyle(exchange: Exchange) -> Exchange:
        answer = _without(draw, word, exchange, question)
        return Exchange(exchange.user, exchange.thinking + f'\nWithout the word "{word}".', answer, Expect("system manners", "without", word))

    return Manner(draw.plain(FORBIDDEN, w=word), question, restyle)


def _without(draw: Draw, word: str, exchange: Exchange, question: Callable[[Draw], Exchange]) -> str:
    if not says(exchange.answer, word):
        return exchange.answer
    if exchange.expect is not None:
        short = _short(exchange)
        return "I know it, but I may not say it." if says(short, word) else short
    for _ in range(20):
        if not says(again := question(draw).answer, word):
            return again
    return "OK!"


def says(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def named(draw: Draw) -> Manner:
    called = name(draw)

    def question(draw: Draw) -> Exchange:
        answer = draw.say("I'm {w}.", "My name is {w}.", "I'm {w}, nice to meet you!", w=called)
        return Exchange(draw.ask(ASK_WHO if draw.chance(0.7) else palaver.WHO), f"Here my name is {called}.", answer, Expect("system manners", "has_word", called))

    return Manner(draw.plain(NAMED, w=called), question, lambda exchange: exchange)


def fixed_words(draw: Draw) -> Manner:
    at_end = draw.chance(0.6)
    said = " ".join(anything(draw) for _ in range(draw.between(1, 3))).capitalize() + draw.pick(("!", "."))

    def restyle(exchange: Exchange) -> Exchange:
        answer = f"{exchange.answer} {said}" if at_end else f"{said} {exchange.answer}"
        thought = f"{exchange.thinking}\n{'At the end' if at_end else 'First'}: {said}"
        return Exchange(exchange.user, thought, answer, Expect("system manners", "ends" if at_end else "starts", said))

    return Manner(draw.plain(ENDING if at_end else STARTING, w=said), _any_question, restyle)


KINDS = (capitals, capitals, lower, one_word, one_word, json_keys, json_keys, bullets, bullets, forbidden, forbidden, named, named, fixed_words)


def mannered(draw: Draw) -> tuple[str, list[Exchange]]:
    """A system prompt with a manner, and one to four exchanges that keep to it."""
    manner = draw.pick(KINDS)(draw)
    persona = "" if manner.question.__qualname__.startswith("named") else draw.pick(PERSONAS)
    turns = [manner.restyle(manner.question(draw)) for _ in range(draw.between(1, 4) if draw.chance(0.4) else 1)]
    return persona + manner.prompt, turns


def everyday(draw: Draw) -> str:
    """A system prompt that asks for nothing special."""
    return draw.plain(EVERYDAY, x=anything(draw), n=name(draw))


