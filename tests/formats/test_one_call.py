"""A reply that may make one call is whole where it would begin a second one, in every syntax and every cut."""

from __future__ import annotations

import random

import pytest

from palaver.events import ReadEvent, ToolCallOpened, fold
from palaver.formats.base import RenderOptions
from palaver.messages import user
from tests.formats.families import FAMILIES, TOOLS, Family, Kind
from tests.formats.test_families import cut, made, meaning, replies

CALLING = [
    pytest.param(family, kind, id=f"{name}, {kind}")
    for name, family in FAMILIES.items()
    for kind in Kind
    if any(len(said.calls) > 1 for said in replies(family, kind))
]


@pytest.mark.parametrize(("family", "kind"), CALLING)
def test_nothing_is_told_from_the_second_call_on(family: Family, kind: Kind) -> None:
    format, pieces = made(family, kind)
    for said in (said for said in replies(family, kind) if len(said.calls) > 1):
        options = RenderOptions(thinking=said.thinks, one_call=True)
        prompt = format.render([user("q")], TOOLS, options)
        for rng in (None, random.Random(1)):
            reader = format.reader(prompt, (), TOOLS, options)
            events: list[ReadEvent] = reader.open()
            for token in cut(pieces, said.text, rng):
                events += reader.feed(token)
                if reader.whole:
                    break
            assert reader.whole
            assert reader.close() == []
            assert sum(isinstance(event, ToolCallOpened) for event in events) == 1
            assert meaning(fold(events).message)[2] == said.calls[:1]
