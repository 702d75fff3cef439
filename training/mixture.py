"""Which abilities make up the training, how often each, and how they are strung together to conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import TypeVar

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
from training.conversations import Exchange, Json, Message, Sample, conversation
from training.phrasings import Draw, Split

SINGLE: tuple[tuple[float, Callable[[Draw], Exchange]], ...] = (
    (0.28, arithmetic.any_one),
    (0.27, letters.any_one),
    (0.11, facts.any_one),
    (0.14, honesty.any_one),
    (0.06, small_talk.any_one),
    (0.09, palaver.any_one),
    (0.05, long_replies.any_one),
)
AWAY_FROM_TOOLS = tuple(one for one in SINGLE if one[1] not in (arithmetic.any_one, honesty.any_one))
"""What neither a clock nor a calculator would be asked."""
DIRECT = 0.15
AT_TERMINAL = 0.15
"""How often the prompt says that the user is at a terminal."""
T = TypeVar("T")


def weighted(draw: Draw, options: tuple[tuple[float, T], ...]) -> T:
    at = draw.random.random() * sum(weight for weight, _ in options)
    for weight, option in options:
        at -= weight
        if at < 0:
            return option
    return options[-1][1]


def single(draw: Draw) -> Exchange:
    return weighted(draw, SINGLE)(draw)


def away_from_tools(draw: Draw) -> Exchange:
    return weighted(draw, AWAY_FROM_TOOLS)(draw)


def filler(draw: Draw) -> Exchange:
    """Other talk between turns; rarely a long reply."""
    while len((found := single(draw)).answer) > 300 and draw.chance(0.9):
        pass
    return found


def _system(draw: Draw) -> str:
    return manners.everyday(draw) if draw.chance(0.35) else ""


def talk(draw: Draw) -> Sample:
    """One exchange, alone or after others."""
    before = [filler(draw) for _ in range(draw.between(1, 5) if draw.chance(0.25) else 0)]
    if draw.chance(0.01):
        return conversation(*before, *small_talk.jokes(draw), system=_system(draw))
    return conversation(*before, single(draw), system=_system(draw))


def remembered(draw: Draw) -> Sample:
    if draw.chance(0.1):
        return conversation(*memory.never_told(draw, filler), system=_system(draw))
    if draw.chance(0.05):
        system, turn = memory.from_system(draw)
        return conversation(*[filler(draw) for _ in range(draw.between(0, 2))], turn, system=system)
    fillers = draw.pick((0, 1, 2, 3, 5, 8, 9, 10, 12)) if draw.chance(0.95) else draw.between(20, 80)
    turns = memory.remembered(draw, filler, fillers)
    if draw.chance(0.12):
        turns = turns[: draw.between(1, min(3, len(turns)))]
    return conversation(*turns, system=_system(draw))


def followed(draw: Draw) -> Sample:
    turns = follow_ups.numbers(draw, draw.between(1, 3)) if draw.chance(0.65) else follow_ups.words(draw)
    before = [filler(draw)] if draw.chance(0.2) else []
    return conversation(*before, *turns, system=_system(draw))


def mannered(draw: Draw) -> Sample:
    system, turns = manners.mannered(draw)
    return conversation(*turns, system=system)


def _offered(ask: Callable[[Draw], tuple[Exchange, tuple[Json, ...]]]) -> Callable[[Draw], Sample]:
    """A request beside the tools that are offered, alone or after other talk."""

    def drawn(draw: Draw) -> Sample:
        exchange, listed = ask(draw)
        before = [filler(draw)] if draw.chance(0.12) else []
        return conversation(*before, exchange, system=_system(draw), tools=listed)

    return drawn


def _no_demo_tool(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    return tools.no_demo_tool(draw, away_from_tools)


def _none_fits(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    return tools.none_fits(draw, single)


TOOLED: tuple[tuple[float, Callable[[Draw], Sample]], ...] = (
    (0.11, tools.told),
    (0.06, tools.chained),
    (0.08, _offered(tools.several_calls)),
    (0.06, _offered(tools.one_string)),
    (0.05, _offered(_no_demo_tool)),
    (0.04, tools.again),
    (0.10, tools.answered),
    (0.19, _offered(tools.one_call)),
    (0.17, _offered(tools.two_calls)),
    (0.12, _offered(_none_fits)),
    (0.02, _offered(tools.missing_value)),
)
POLISHED: tuple[tuple[float, Callable[[Draw], Sample]], ...] = (
    (0.09, tools.told),
    (0.05, tools.chained),
    (0.27, _offered(tools.several_calls)),
    (0.10, _offered(tools.known_call)),
    (0.08, _offered(tools.one_string)),
    (0.05, _offered(_no_demo_tool)),
    (0.03, tools.again),
    (0.08, tools.answered),
    (0.13, _offered(tools.one_call)),
    (0.13, _offered(tools.two_calls)),
    (0.07, _offered(_none_fits)),
    (0.02, _offered(tools.missing_value)),
)
"""The everyday tools come more often in the second stage, several at once above all."""


def tooled(draw: Draw) -> Sample:
    return weighted(draw, TOOLED)(draw)


def polished(draw: Draw) -> Sample:
    return weighted(draw, POLISHED)(draw)


def friendly(draw: Draw) -> Sample:
    return conversation(*[filler(draw)] * draw.chance(0.3), small_talk.any_one(draw), system=_system(draw))


def long_memory(draw: Draw) -> Sample:
    return conversation(*memory.remembered(draw, single, draw.between(20, 70)), system=_system(draw))


def direct_sum(draw: Draw) -> Sample:
    """A sum of at most four digits that is answered without a thought."""
    asked = (arithmetic.sum_ if draw.chance(0.5) else arithmetic.difference)(draw, 4)
    return without_thinking(conversation(asked, system=_system(draw)))


def direct_fact(draw: Draw) -> Sample:
    return without_thinking(conversation(facts.any_one(draw), system=_system(draw)))


def itself(draw: Draw) -> Sample:
    return conversation(palaver.any_one(draw), system=_system(draw))


def as_json(draw: Draw) -> Sample:
    """An answer that a grammar makes JSON, or a call that it demands; often without a thought."""
    if draw.chance(0.2):
        found = json_answers.required(draw, away_from_tools)
    else:
        system = _system(draw)
        found = json_answers.answered(draw, single, (Message("system", system),) if system else ())
    return without_thinking(found) if draw.chance(0.4) else found


KINDS: tuple[tuple[float, Callable[[Draw], Sample]], ...] = (
    (0.55, talk),
    (0.03, as_json),
    (0.10, remembered),
    (0.06, followed),
    (0.10, mannered),
    (0.19, tooled),
)


POLISH: tuple[tuple[float, Callable[[Draw], Sample]], ...] = (
    (0.37, talk),
    (0.06, remembered),
    (0.01, long_memory),
    (0.05, followed),
    (0.07, mannered),
    (0.02, friendly),
    (0.03, direct_sum),
    (0.02, direct_fact),
    (0.03, itself),
    (0.06, as_json),
    (0.37, polished),
)
"""The mixture of the second, shorter stage: more of what the first one learned least, calls above all."""


def sample(draw: Draw, polish: bool = False) -> Sample:
    draw = replace(draw, terminal=draw.chance(AT_TERMINAL))
    found = replace(weighted(draw, POLISH if polish else KINDS)(draw), terminal=draw.terminal)
    return without_thinking(found) if draw.chance(DIRECT) else found


def without_thinking(found: Sample) -> Sample:
    messages = tuple(Message(m.role, m.content, "", m.calls) for m in found.messages)
    return replace(found, messages=messages, thinks=False)


def samples(seed: int, shard: int, split: Split, pieces: tuple[str, ...], polish: bool = False) -> Iterator[Sample]:
    """The endless stream of one shard: a pure function of its arguments."""
    draw = Draw(Random(f"{seed}/{shard}"), split, pieces)
    while True:
        yield sample(draw, polish)
