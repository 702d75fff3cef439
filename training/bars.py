"""What the evaluation measures: each bar with how its cases are drawn, and the share that must be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from training import mixture
from training.abilities import (
    arithmetic,
    facts,
    follow_ups,
    honesty,
    json_answers,
    letters,
    long_replies,
    manners,
    memory,
    palaver,
    small_talk,
    tools,
)
from training.conversations import Exchange, Sample, conversation
from training.phrasings import Draw, Split
from training.words import PROGRAM_WORDS


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    wanted: float | None
    draw: Callable[[Draw], Sample]


def _alone(ask: Callable[[Draw], Exchange]) -> Callable[[Draw], Sample]:
    def draw_one(draw: Draw) -> Sample:
        return conversation(ask(draw), system=manners.everyday(draw) if draw.chance(0.25) else "")

    return draw_one


def _direct(ask: Callable[[Draw], Exchange]) -> Callable[[Draw], Sample]:
    return lambda draw: mixture.without_thinking(conversation(ask(draw)))


def _sums(most: int) -> Callable[[Draw], Exchange]:
    return lambda draw: (arithmetic.sum_ if draw.chance(0.5) else arithmetic.difference)(draw, most)


def _counted(draw: Draw) -> Exchange:
    return letters.count(draw) if draw.chance(0.7) else letters.length(draw)


def _short_filler(draw: Draw) -> Exchange:
    while len((found := mixture.single(draw)).answer) > 200:
        pass
    return found


def _memory(draw: Draw) -> Sample:
    return conversation(*memory.remembered(draw, _short_filler, draw.between(8, 10)))


def _long_memory(draw: Draw) -> Sample:
    return conversation(*memory.remembered(draw, mixture.single, draw.between(30, 60)))


def _calls(draw: Draw) -> Sample:
    exchange, listed = tools.two_calls(draw) if draw.chance(0.25) else tools.one_call(draw)
    return conversation(exchange, tools=listed)


def _everyday_calls(draw: Draw) -> Sample:
    exchange, listed = tools.known_call(draw)
    return conversation(exchange, tools=listed)


def _one_string(draw: Draw) -> Sample:
    exchange, listed = tools.one_string(draw)
    return conversation(exchange, tools=listed)


def _several_calls(draw: Draw) -> Sample:
    exchange, listed = tools.several_calls(draw)
    return conversation(exchange, tools=listed)


def _no_demo_tool(draw: Draw) -> Sample:
    exchange, listed = tools.no_demo_tool(draw, mixture.away_from_tools)
    return conversation(exchange, tools=listed)


def _own_words(draw: Draw) -> Exchange:
    return letters.reverse(draw, draw.pick(PROGRAM_WORDS))


def _no_call(draw: Draw) -> Sample:
    exchange, listed = tools.none_fits(draw, _short_filler)
    return conversation(exchange, tools=listed)


def _manners(draw: Draw) -> Sample:
    system, turns = manners.mannered(draw)
    return conversation(*turns, system=system)


def _chains(draw: Draw) -> Sample:
    return conversation(*(follow_ups.numbers(draw, draw.between(1, 3)) if draw.chance(0.7) else follow_ups.words(draw)))


def _other_words(draw: Draw) -> Exchange:
    while not (found := letters.any_one(draw)).expect or found.expect.bar != "other word tasks":
        pass
    return found


def _never_told(draw: Draw) -> Sample:
    return conversation(*memory.never_told(draw, _short_filler))


def _at_terminal(draw: Draw) -> Sample:
    draw = replace(draw, terminal=True)
    return replace(conversation(palaver.any_one(draw)), terminal=True)


def _json(draw: Draw) -> Sample:
    return json_answers.free(draw, _short_filler)


BARS = (
    Bar("+ and − to 4 digits", 0.995, _alone(_sums(4))),
    Bar("+ and − to 6 digits", 0.98, _alone(_sums(6))),
    Bar("× to 3 by 2 digits", 0.98, _alone(arithmetic.product)),
    Bar("division with remainder", 0.98, _alone(arithmetic.quotient)),
    Bar("letters counted, unseen words", 0.99, _alone(_counted)),
    Bar("words reversed, unseen words", 0.99, _alone(letters.reverse)),
    Bar("memory over 8 turns and more", 0.99, _memory),
    Bar("tool calls, unseen functions", 0.99, _calls),
    Bar("tool calls, invented name and one text", 0.99, _one_string),
    Bar("several everyday calls at once", 0.98, _several_calls),
    Bar("calls that need a result first", 0.98, tools.chained),
    Bar("results of several calls told", 0.98, tools.told),
    Bar("no call when none fits", 0.98, _no_call),
    Bar("no call beside the demo's tools", 0.98, _no_demo_tool),
    Bar("Palaver's own words reversed", 0.99, _alone(_own_words)),
    Bar("system manners", 0.98, _manners),
    Bar("out of range, answered honestly", 0.98, _alone(honesty.any_one)),
    Bar("comparisons", None, _alone(arithmetic.comparison)),
    Bar("word problems", None, _alone(arithmetic.story)),
    Bar("chains over turns", None, _chains),
    Bar("other word tasks", None, _alone(_other_words)),
    Bar("small facts", None, _alone(facts.any_one)),
    Bar("everyday tools, names known", None, _everyday_calls),
    Bar("answers from tool results", None, tools.answered),
    Bar("itself and Palaver", 0.95, _alone(palaver.any_one)),
    Bar("itself and Palaver, at a terminal", 0.95, _at_terminal),
    Bar("JSON under a grammar", 0.98, _json),
    Bar("thinking off: JSON under a grammar", 0.98, lambda draw: mixture.without_thinking(_json(draw))),
    Bar("small talk, not refused", None, _alone(small_talk.any_one)),
    Bar("asked, never told", None, _never_told),
    Bar("long replies", None, _alone(long_replies.any_one)),
    Bar("memory beyond 1,024 tokens", None, _long_memory),
    Bar("thinking off: small facts", None, _direct(facts.any_one)),
    Bar("thinking off: + and − to 4 digits", None, _direct(_sums(4))),
)


def cases(bar: Bar, count: int, seed: int) -> list[Sample]:
    """Cases in held-out phrasings only; the same ones for the same seed."""
    draw = Draw(Random(f"evaluation/{seed}/{bar.name}"), Split.HELD_OUT)
    return [bar.draw(draw) for _ in range(count)]
