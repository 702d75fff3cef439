"""A call that must come can be said in every published format that has calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaver.engines.torch.grammars import Grammars
from palaver.errors import BadParameter, TemplateError
from palaver.formats.options import Options
from palaver.formats.template import Template
from palaver.formats.templated import TemplateFormat
from palaver.formats.tokenizer import FastTokenizer
from palaver.messages import Tool, user
from palaver.phases import Phase
from tests.tiny import MERGES, byte_level

SHARED = Path(__file__).parents[3] / "shared" / "formats"
TOOLS = tuple(
    Tool(name, "", {"type": "object", "properties": {key: {"type": kind}}, "required": [key]})
    for name, key, kind in (("get_weather", "city", "string"), ("set_lamp", "level", "integer"))
)


def test_calls_can_be_forced_in_published_formats() -> None:
    templates = sorted(SHARED.rglob("*.jinja"))
    if not templates:
        pytest.skip("the published templates are not here: forced calls were NOT tried on them")
    tokenizer = FastTokenizer(byte_level(merges=MERGES))
    grammars = Grammars(tokenizer.vocabulary)
    forced = 0
    for path in templates:
        format = TemplateFormat(
            Template(path.read_text(encoding="utf-8"), path.name), tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}
        )
        try:
            prompt = format.render((user("Hi"),), TOOLS, Options(must_call=("get_weather", "set_lamp")))
        except (BadParameter, TemplateError):  # no calls, calls in typed headers, or a template that refuses
            continue
        states = prompt.phases.states
        for constraint in {state.constraint for state in states if state.constraint is not None}:
            grammars.compile(constraint)
        first = states[: len(states) // 2]
        assert all(state.constraint is not None for state in first if state.phase is Phase.ANSWER), path.name
        forced += 1
    assert forced >= 40
