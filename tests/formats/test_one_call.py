"""With `one_call` a reply ends before a second call, in every syntax and however it is split."""

from __future__ import annotations

import random

import pytest

from palaver.events import ReadEvent, ToolCallOpened, fold
from palaver.formats.base import RenderOptions
from palaver.messages import user
from tests.formats.families import FAMILIES, TOOLS, Family, Kind
from tests.formats.test_families import cut, make_format, meaning, replies

CALLING = [
    pytest.param(family, kind, id=f"{name}, {kind}")
    for name, family in FAMILIES.items()
    for kind in Kind
    if any(len(case.calls) > 1 for case in replies(family, kind))
]


@pytest.mark.parametrize(("family", "kind"), CALLING)
def test_a_reply_ends_before_a_second_call(family: Family, kind: Kind) -> None:
    format, pieces = make_format(family, kind)
    for case in (case for case in replies(family, kind) if len(case.calls) > 1):
        options = RenderOptions(thinking=case.thinks, one_call=True)
        prompt = format.render([user("q")], TOOLS, options)
        for rng in (None, random.Random(1)):
            reader = format.reader(prompt, (), TOOLS, options)
            events: list[ReadEvent] = reader.open()
            for token in cut(pieces, case.text, rng):
                events += reader.feed(token)
                if reader.complete:
                    break
            assert reader.complete
            assert reader.close() == []
            assert sum(isinstance(event, ToolCallOpened) for event in events) == 1
            assert meaning(fold(events).message)[2] == case.calls[:1]
