"""Answers in JSON that a grammar asks for: the prompt says nothing of it, so what the grammar decides is not learned.

A response format reaches the model as tokens that are forced: the first brace, and the keys of a schema. What the model has to
know is all that follows them: a value that fits the question, the end of a text, a number or a list, and the signs between
them, where a grammar would let it write white space without end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from training.abilities.manners import ANSWER_KEYS, REASON_KEYS, short_fact
from training.abilities.schemas import FLAG_PARAMETERS, NUMBER_PARAMETERS, TEXT_PARAMETERS, function
from training.conversations import Exchange, Expect, Json, Message, Piece, Sample
from training.phrasings import Draw
from training.words import made_up

LONGEST = 160
NUMBER_KEYS = ("answer", "result", "sum", "total", "value", "number", "count", "n")
MANY_KEYS = ("items", "list", "steps", "words", "tags", "numbers", "values", "parts")
INNER_KEYS = ("data", "details", "object", "info", "content", "body")
KINDS = ("text", "text", "text", "integer", "integer", "number", "flag", "texts", "integers", "object")


@dataclass(slots=True)
class Writing:
    """A reply in pieces, and the question it answers."""

    draw: Draw
    exchange: Exchange
    space: str = " "
    """What stands after a colon or a comma."""
    pieces: list[Piece] = field(default_factory=list)

    def force(self, text: str) -> None:
        """Text that the grammar leaves no choice about. Its tokens may be other ones than those of the whole."""
        cut = self.draw.between(1, len(text) - 1) if len(text) > 1 and self.draw.chance(0.3) else 0
        self.pieces += [Piece(part, False) for part in (text[:cut], text[cut:]) if part]

    def learn(self, text: str) -> None:
        """Text that the model chooses."""
        if self.pieces and self.pieces[-1].learned:  # one piece, so that its tokens are those of the whole
            text = self.pieces.pop().text + text
        self.pieces.append(Piece(text, True))

    def sample(self, before: tuple[Message, ...], tools: tuple[Json, ...] = ()) -> Sample:
        user, reply = self.exchange.messages()
        content = "".join(piece.text for piece in self.pieces)
        messages = (*before, user, Message("assistant", content, reply.thinking))
        return Sample(messages, tools, pieces=tuple(self.pieces))


def answered(draw: Draw, other: Callable[[Draw], Exchange], before: tuple[Message, ...] = ()) -> Sample:
    """A question whose answer has to be JSON of some shape."""
    writing = _begin(draw, other)
    kind = draw.random.random()
    if kind < 0.35:
        _free_object(writing)
    elif kind < 0.8:
        _object(writing, draw.pick((1, 1, 1, 2, 2, 3, 4)))
    elif kind < 0.93:
        _array(writing)
    else:
        _string(writing)
    return writing.sample(before)


def free(draw: Draw, other: Callable[[Draw], Exchange]) -> Sample:
    """A question of whose answer only the first sign is forced: an object or a text of whatever content."""
    writing = _begin(draw, other)
    (_free_object if draw.chance(0.8) else _string)(writing)
    return replace(writing.sample(()), expect=Expect("JSON", "json"))


def _begin(draw: Draw, other: Callable[[Draw], Exchange]) -> Writing:
    exchange = short_fact(draw) if draw.chance(0.6) else other(draw)
    while len(exchange.answer) > LONGEST or not exchange.answer:
        exchange = other(draw)
    return Writing(draw, exchange, " " if draw.chance(0.85) else "")


def _string(writing: Writing) -> None:
    writing.force('"')
    writing.learn(json.dumps(_text(writing, "answer"), ensure_ascii=False)[1:])


def required(draw: Draw, other: Callable[[Draw], Exchange]) -> Sample:
    """A call that the request demands, whatever the question is."""
    wanted, others = function(draw), [function(draw).schema for _ in range(draw.between(0, 2))]
    writing = Writing(draw, other(draw))
    opening = f'<tool_call>\n{{"name": "{wanted.name}", "arguments": {{'
    for at, parameter in enumerate(wanted.parameters):
        _named(writing, parameter.name, at, opening)
        if parameter.kind == "enum":
            writing.learn(" " + json.dumps(draw.pick(parameter.choices), ensure_ascii=False))
        else:
            _value(writing, parameter.name, {"string": "word", "boolean": "flag"}.get(parameter.kind, parameter.kind))
    if not wanted.parameters:
        writing.force(opening)
    writing.learn("}}\n</tool_call>")
    listed = [wanted.schema, *others]
    draw.random.shuffle(listed)
    return writing.sample((), tuple(listed))


def _free_object(writing: Writing) -> None:
    """An object of which only the brace is asked for: one key, and the answer."""
    writing.force('{"' if writing.draw.chance(0.7) else "{")
    writing.learn('answer":' if writing.pieces[-1].text.endswith('"') else '"answer":')
    shown = _short(writing)
    writing.learn(writing.space + (shown if _is_number(shown) else json.dumps(writing.exchange.answer, ensure_ascii=False)) + "}")


def _object(writing: Writing, count: int, inside: bool = False) -> None:
    """The keys of a schema with their values."""
    draw = writing.draw
    if inside:
        writing.learn(writing.space + "{")
    kinds = [draw.pick(KINDS[:-1] if inside else KINDS) for _ in range(count)]
    for at, (key, kind) in enumerate({_key(draw, kind): kind for kind in kinds}.items()):
        _named(writing, key, at, "" if inside else "{")
        _value(writing, key, kind)
    writing.learn("}")


def _named(writing: Writing, key: str, at: int, opening: str) -> None:
    """The key of a value: the first of an object, or one after others. Only its name is forced, and how a reply begins."""
    if at == 0 and opening:
        writing.force(f'{opening}"{key}')
    else:
        writing.learn(f",{writing.space}\"" if at else '"')
        writing.force(key)
    writing.learn('":')


def _array(writing: Writing) -> None:
    """A list on its own: of texts, of numbers, or of objects that are alike."""
    draw = writing.draw
    kind = draw.pick(("texts", "integers", "objects"))
    if kind != "objects":
        writing.force("[")
        writing.learn(_listed(writing, kind)[1:])
        return
    keys = [(_key(draw, kind), kind) for kind in (draw.pick(("text", "word", "integer")) for _ in range(draw.between(1, 2)))]
    count = draw.between(1, 3)
    for number in range(count):
        if number:
            writing.learn(f"}},{writing.space}{{")
        for at, (key, inner) in enumerate(keys):
            _named(writing, key, at, "" if number else "[{")
            _value(writing, key, inner)
    writing.learn("}]")


def _key(draw: Draw, kind: str) -> str:
    known = {
        "text": (*ANSWER_KEYS, *REASON_KEYS, *TEXT_PARAMETERS),
        "word": TEXT_PARAMETERS,
        "flag": ("ok", "correct", "valid", "done", *FLAG_PARAMETERS),
        "texts": MANY_KEYS,
        "integers": MANY_KEYS,
        "object": INNER_KEYS,
    }.get(kind, (*NUMBER_KEYS, *NUMBER_KEYS, *NUMBER_PARAMETERS))
    return draw.pick(known) if draw.chance(0.75) else made_up(draw)


def _value(writing: Writing, key: str, kind: str) -> None:
    match kind:
        case "text" | "word":
            found = json.dumps(_text(writing, key) if kind == "text" else _word(writing), ensure_ascii=False)
        case "integer" | "number":
            found = _number(writing)
        case "flag":
            found = "true"
        case "texts" | "integers":
            found = _listed(writing, kind)
        case _:
            _object(writing, writing.draw.pick((1, 1, 2)), inside=True)
            return
    writing.learn(writing.space + found)


def _listed(writing: Writing, kind: str) -> str:
    said = _numbers(writing) if kind == "integers" else [json.dumps(one, ensure_ascii=False) for one in _words(writing)]
    return f"[{f',{writing.space}'.join(said)}]"


def _short(writing: Writing) -> str:
    expect = writing.exchange.expect
    value: Any = expect.value if expect else None
    return value if isinstance(value, str) and value and " " not in value else ""


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?(0|[1-9]\d*)", text) is not None


def _text(writing: Writing, key: str) -> str:
    if key in REASON_KEYS:
        return "I worked it out."
    return _short(writing) if _short(writing) and writing.draw.chance(0.4) else writing.exchange.answer


def _word(writing: Writing) -> str:
    return _short(writing) or writing.draw.pick(_words(writing))


def _words(writing: Writing) -> list[str]:
    """Up to three words: the answer, or some of the question."""
    if (short := _short(writing)) and writing.draw.chance(0.5):
        return [short]
    found = re.findall(r"\w+", writing.exchange.user) or ["none"]
    return found[: writing.draw.between(1, 3)]


def _number(writing: Writing) -> str:
    if _is_number(_short(writing)):
        return _short(writing)
    return next(iter(_numbers(writing)))


def _numbers(writing: Writing) -> list[str]:
    """The number that answers, or up to three of the question."""
    if _is_number(_short(writing)) and writing.draw.chance(0.5):
        return [_short(writing)]
    found = [one for one in re.findall(r"\d+", writing.exchange.user) if _is_number(one)]
    return found[: writing.draw.between(1, 3)] or ["1"]
