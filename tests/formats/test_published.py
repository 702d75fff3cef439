"""Published templates, where they are at hand beside the checkout: the library's ids, and no content as control."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers import logging as transformers_logging

from palaver.commands.format_trials import STRINGS, control_strings
from palaver.errors import TemplateError
from palaver.formats.base import RenderOptions
from palaver.formats.facts import SwitchKind
from palaver.formats.format import TemplateFormat, _schemas
from palaver.formats.markers import looks_special
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.messages import Message, Tool, ToolCall, assistant, system, tool, user
from tests.formats.adversarial import COUNT, contents, control_ids
from tests.formats.test_unseen import facts_without_evidence
from tests.tiny import MERGES, byte_level

transformers_logging.set_verbosity_error()
FOLDER = Path(__file__).parents[3] / "shared" / "formats" / "templates"
PATHS = sorted(FOLDER.glob("*.jinja"))
NOW = datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)
TOOLS = [Tool("look_up", "Looks it up.", {"type": "object", "properties": {"word": {"type": "string"}}})]
CALL = ToolCall("callid001", "look_up", '{"word": "tree"}')
CONVERSATIONS: dict[str, tuple[list[Message], list[Tool]]] = {
    "one question": ([user("Hi, who are you?")], []),
    "turns": ([user("think  \n this\tover"), assistant("no 你好"), user("why, thinker? <b>x</b> < 3 [x]")], []),
    "a system prompt": ([system("Be brief."), user("Hi"), assistant("Yes?"), user("No.")], []),
    "past thinking": ([user("a"), assistant("b", thinking="because"), user("c")], []),
    "tools": ([user("What is a tree?")], TOOLS),
    "a call": ([user("What?"), assistant(calls=(CALL,)), tool("callid001", "a plant", "look_up")], TOOLS),
    "after a call": (
        [user("What?"), assistant(calls=(CALL,)), tool("callid001", "a plant", "look_up"), assistant("A plant."),
         user("Thanks")],
        TOOLS,
    ),
}  # fmt: skip

pytestmark = pytest.mark.skipif(not PATHS, reason="NOTHING IS SHOWN HERE: the published templates are not at hand")


@cache
def definition(path: Path) -> str:
    controls = sorted(control_strings(path.read_text(encoding="utf-8")) | set(STRINGS.values()))
    special = [text for text in controls if looks_special(text)]
    return byte_level(special, [text for text in controls if text not in special], MERGES)


@cache
def make_format(path: Path) -> TemplateFormat:
    source = path.read_text(encoding="utf-8")
    return TemplateFormat(Template(source, path.stem), FastTokenizer(definition(path)), STRINGS)


def library_ids(path: Path, messages: list[Message], tools: list[Tool]) -> list[int] | str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(definition(path)), **STRINGS)
    format = make_format(path)
    dates = format.date_variables(RenderOptions(now=NOW))
    variables: dict[str, Any] = {**format.facts.tool_variables(_schemas(tools)), **dates}
    try:
        ids = tokenizer.apply_chat_template(
            [format.template_message(m) for m in messages],
            tools=variables.pop("tools", None),
            chat_template=path.read_text(encoding="utf-8"),
            add_generation_prompt=True,
            return_dict=False,
            tokenize=True,
            **variables,
        )
    except Exception as error:  # the library raises what the template raises
        return f"{type(error).__name__}: {error}"
    assert isinstance(ids, list)
    return ids


IMMUTABLE = "access to attribute 'append' of 'list' object is unsafe"
"""The library's sandbox lets no list grow; ours counts what it grows by, so such templates run here."""
GENERATOR = "Object of type generator is not JSON serializable"
"""Ours writes what `map` and `select` give as a list, as other renderers do."""


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_harmless_contents_give_the_ids_of_apply_chat_template(path: Path) -> None:
    for name, (messages, tools) in CONVERSATIONS.items():
        theirs = library_ids(path, messages, tools)
        if isinstance(theirs, str) and (IMMUTABLE in theirs or GENERATOR in theirs):
            continue
        try:
            ours: list[int] | None = list(make_format(path).render(messages, tools, RenderOptions(now=NOW)).context_ids)
        except TemplateError:
            ours = None
        assert ours == (None if isinstance(theirs, str) else theirs), (name, theirs)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_content_changes_the_control_tokens(path: Path) -> None:
    format = make_format(path)
    hostile = contents(sorted(format.tokenizer.control), COUNT)
    for calls in (False, True):
        shape = next((s for s in (True, False) if accepts(format, calls, s)), None)
        if shape is None:
            continue
        harmless = control_ids(format, ["harmless"] * 9, calls, shape)
        for number in range(COUNT):
            texts = [hostile[(number + 37 * place) % COUNT] for place in range(9)]
            assert control_ids(format, texts, calls, shape) == harmless, texts


def accepts(format: TemplateFormat, calls: bool, system: bool) -> bool:
    try:
        control_ids(format, ["harmless"] * 9, calls, system)
    except TemplateError:
        return False
    return True


SWITCHES = {
    "ByteDance-Seed-OSS": ("thinking_budget", SwitchKind.BUDGET, -1, (-1, 0)),
    "tencent-Hy3": ("reasoning_effort", SwitchKind.EFFORT, "no_think", ("no_think", "low", "high")),
    "openai-gpt-oss-120b": ("reasoning_effort", SwitchKind.EFFORT, "medium", ("low", "medium", "high")),
    "Qwen-Qwen3-0.6B": ("enable_thinking", SwitchKind.THINKING, True, (True, False)),
    "poolside-Laguna-S-2.1": ("preserve_thinking", SwitchKind.KEEPING, False, (True, False)),
    "meta-llama-Llama-3.3-70B-Instruct": ("date_string", SwitchKind.DATE, "26 Jul 2024", ()),
    "unsloth-Apriel-1.5": ("add_thoughts", SwitchKind.OTHER, None, (True, False)),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_variable_is_for_is_learned(name: str) -> None:
    found = {switch.name: switch for switch in make_format(FOLDER / f"{name}.jinja").switches}
    variable, kind, default, values = SWITCHES[name]
    assert (found[variable].kind, found[variable].default, found[variable].values) == (kind, default, values)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_fact_has_evidence(path: Path) -> None:
    assert facts_without_evidence(make_format(path).facts) == []


@pytest.mark.slow
def test_every_template_is_learned_the_same_way_whatever_else_is_there() -> None:
    """No template is known by name: what is learned depends on its source and its tokens alone."""
    for path in PATHS:
        again = TemplateFormat(
            Template(path.read_text(encoding="utf-8"), "another name"), FastTokenizer(definition(path)), STRINGS
        )
        assert again.facts == make_format(path).facts
