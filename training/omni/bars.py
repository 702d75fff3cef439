"""What the evaluation of Sprout Omni measures: held-out phrasings, voices that training never heard, fresh pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from training.conversations import Exchange, conversation
from training.mixture import without_thinking
from training.omni import questions, scenes
from training.omni.questions import MediaSample, Shown
from training.omni.scenes import Scene
from training.phrasings import Draw, Split


@dataclass(frozen=True, slots=True)
class MediaBar:
    name: str
    wanted: float | None
    draw: Callable[[Draw], Shown]
    thinks: bool = True
    second_turn: bool = False


def _one_or_several(ask: Callable[[Draw, Scene], Exchange]) -> Callable[[Draw], Shown]:
    """One thing, or one among others."""

    def draw_one(draw: Draw) -> Shown:
        if draw.chance(0.5):
            scene = scenes.large_thing(draw) if draw.chance(0.5) else scenes.scene(draw, 1)
        else:
            scene = scenes.different_things(draw, draw.between(2, 4))
        return questions.shown(draw, scene, ask)

    return draw_one


def _two_digits(draw: Draw) -> Shown:
    return questions.drawn_number(draw, draw.between(10, 99))


def _to_99(draw: Draw) -> Shown:
    return questions.spoken_number(draw, draw.between(0, 99))


def _drawn_plus_five(draw: Draw) -> Shown:
    return questions.drawn_sum(draw, draw.between(10, 99), 5)


def _spoken_plus_five(draw: Draw) -> Shown:
    return questions.spoken_sum(draw, draw.between(0, 99), 5)


BARS = (
    MediaBar("colour", 0.97, _one_or_several(questions.colour_of)),
    MediaBar("shape", 0.97, _one_or_several(questions.shape_of)),
    MediaBar("counts to 6", 0.95, questions.counted),
    MediaBar("position", 0.95, questions.placed),
    MediaBar("drawn two-digit numbers", 0.90, _two_digits),
    MediaBar("spoken numbers to 99, unseen voices", 0.85, _to_99),
    MediaBar("drawn number plus five", 0.85, _drawn_plus_five),
    MediaBar("spoken number plus five", 0.85, _spoken_plus_five),
    MediaBar("drawn words, unseen", None, questions.drawn_word),
    MediaBar("spoken words, unseen voices", None, questions.spoken_word),
    MediaBar("spoken colours, unseen voices", None, questions.spoken_colour),
    MediaBar("sums asked aloud", None, questions.asked_aloud),
    MediaBar("a picture and a sound", None, questions.same_number),
    MediaBar("whole pictures", None, _one_or_several(questions.whole)),
    MediaBar("second question on a picture", None, questions.placed, second_turn=True),
    MediaBar("thinking off: colour", None, _one_or_several(questions.colour_of), thinks=False),
    MediaBar("thinking off: drawn numbers", None, _two_digits, thinks=False),
    MediaBar("thinking off: spoken numbers", None, _to_99, thinks=False),
)


def cases(bar: MediaBar, count: int, seed: int) -> list[MediaSample]:
    """Cases in held-out phrasings only; the same ones for the same seed."""
    draw = Draw(Random(f"omni evaluation/{seed}/{bar.name}"), Split.HELD_OUT)
    return [_case(bar, draw) for _ in range(count)]


def _case(bar: MediaBar, draw: Draw) -> MediaSample:
    shown = bar.draw(draw)
    if bar.second_turn:
        first = replace(shown, exchange=draw.pick(shown.again)(draw))
        sample = conversation(questions.with_parts(draw, first), shown.exchange)
    else:
        sample = conversation(questions.with_parts(draw, shown))
    return MediaSample(sample if bar.thinks else without_thinking(sample), shown.media)
