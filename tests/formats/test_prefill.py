"""Prefill: a partial answer of a model that thinks first stands after an empty thought, and no marker token is text."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaver.commands.format_trials import STRINGS, PieceTokenizer, control_strings
from palaver.events import fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.loader import load_format
from palaver.formats.template import Template
from palaver.generation import Prompt
from palaver.messages import Message, Role, Text, Thinking, Tool, ToolCall, user
from palaver.models.resolver import resolve_folder
from palaver.phases import Phase
from tests.formats import unseen
from tests.formats.expected_failures import PARTIAL_ANSWERS, expected
from tests.formats.families import FAMILIES

ANSWER = Message(Role.ASSISTANT, (Text("It is"),))
CALL = Message(Role.ASSISTANT, (ToolCall("1", "f", '{"a": '),))
TOOLS = (Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}}),)
PUBLISHED = sorted((Path(__file__).parents[3] / "shared" / "formats" / "templates").glob("*.jinja"))


def partial_text(format: TemplateFormat, message: Message, thinking: bool | None = None) -> str:
    prompt = format.render(
        [user("Why?")], TOOLS if message is CALL else (), RenderOptions(thinking=thinking), partial_reply=message
    )
    return b"".join(format.tokenizer.vocabulary[i] for i in prompt.reply_ids).decode()


def test_an_answer_without_a_thought_follows_the_empty_thought_of_the_history() -> None:
    sprout = load_format(resolve_folder("sprout"))
    assert isinstance(sprout, TemplateFormat)
    for thinking in (None, True):
        assert partial_text(sprout, ANSWER, thinking) == "<think>\n\n</think>\n\nIt is"
        assert partial_text(sprout, CALL, thinking).startswith("<think>\n\n</think>\n\n<tool_call>\n")
    assert partial_text(sprout, ANSWER, False) == "It is"  # the prompt closes the thought
    assert partial_text(sprout, CALL, False).startswith("<tool_call>\n")
    thought = Message(Role.ASSISTANT, (Thinking("So"), Text("It is")))
    assert partial_text(sprout, thought) == "<think>\nSo\n</think>\n\nIt is"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("basalt", "[REFLECT][/REFLECT]It is"),
        ("cobalt", "<inner>\n\n</inner>\nIt is"),
        ("lark", "◁think▷◁/think▷It is"),
        ("moss", "It is"),  # does not think by default
        ("jade", "<reply>It is"),  # the answer has a marker of its own
    ],
)
def test_an_answer_without_a_thought_follows_the_empty_thought_of_the_switch(name: str, written: str) -> None:
    format, _ = unseen.make_format(name)
    assert partial_text(format, ANSWER) == written


def read(format: TemplateFormat, prompt: Prompt, ids: list[int]) -> Message:
    reader = format.reader(prompt)
    events = [*reader.open(), *(event for i in ids for event in reader.feed(i)), *reader.close()]
    return fold(events).message


@pytest.mark.parametrize("letters", [False, True], ids=["as a token", "as letters"])
def test_a_stray_marker_is_text_only_if_it_is_spelled_by_ordinary_tokens(letters: bool) -> None:
    family = FAMILIES["JSON in tags"]
    tokenizer = PieceTokenizer((*family.turns, *family.markers))
    format = TemplateFormat(Template(family.source, family.name), tokenizer, family.strings)
    prompt = format.render([user("Why?")], (), RenderOptions(thinking=False))
    for marker in ("</think>", "<tool_call>", "</tool_call>"):
        spelled = [tokenizer.piece(marker[:4]), tokenizer.piece(marker[4:])]
        between = spelled if letters else [tokenizer.control[marker]]
        message = read(format, prompt, [tokenizer.piece("one "), *between, tokenizer.piece("two")])
        assert message.text == (f"one {marker}two" if letters else "one two")


def test_arguments_of_a_call_keep_the_marker_tokens_that_the_model_wrote() -> None:
    family = FAMILIES["JSON in tags"]
    tokenizer = PieceTokenizer((*family.turns, *family.markers))
    format = TemplateFormat(Template(family.source, family.name), tokenizer, family.strings)
    prompt = format.render([user("Why?")], TOOLS, RenderOptions(thinking=False))
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "x</think>y"}}\n</tool_call>'
    ids = tokenizer.encode(tokenizer.runs(text))
    reader = format.reader(prompt, tools=TOOLS)
    events = [event for i in ids for event in reader.feed(i)]
    assert fold([*events, *reader.close()]).message.tool_calls[0].arguments == '{"a": "x</think>y"}'


def make_format(path: Path) -> tuple[TemplateFormat, PieceTokenizer]:
    source = path.read_text(encoding="utf-8")
    tokenizer = PieceTokenizer(control_strings(source) | set(STRINGS.values()))
    return TemplateFormat(Template(source, path.stem), tokenizer, STRINGS), tokenizer


@pytest.mark.skipif(not PUBLISHED, reason="NOTHING IS SHOWN HERE: the published templates are not at hand")
@pytest.mark.parametrize("path", [expected(path, path.stem, PARTIAL_ANSWERS) for path in PUBLISHED])
def test_no_published_format_shows_a_closing_token_in_a_partial_answer(path: Path) -> None:
    format, tokenizer = make_format(path)
    closer = format.facts.thinking.closer if format.facts.thinking else ""
    if closer not in tokenizer.control:
        return
    prompt = format.render([user("Why?")], partial_reply=ANSWER)
    message = read(format, prompt, [tokenizer.control[closer], tokenizer.piece(" so.")])
    assert closer not in message.text
    assert message.text.strip().startswith("It is")
    assert not message.thinking


@pytest.mark.skipif(not PUBLISHED, reason="NOTHING IS SHOWN HERE: the published templates are not at hand")
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("Qwen-Qwen3-0.6B", "<think>\n\n</think>\n\nIt is"),
        ("GLM-4.6", "\n<think></think>\nIt is"),
        ("Kimi-K2-Thinking", "<think></think>It is"),
        ("HuggingFaceTB-SmolLM3-3B", "<think>\n\n</think>\nIt is"),
        ("ByteDance-Seed-OSS", "<seed:think></seed:think>\nIt is"),
        ("ibm-granite-granite-3.3-2B-Instruct", "It is"),
    ],
)
def test_partial_answers_in_published_formats_follow_an_empty_thought(name: str, written: str) -> None:
    path = next(path for path in PUBLISHED if path.stem == name)
    format, _ = make_format(path)
    prompt = format.render([user("Why?")], partial_reply=ANSWER)
    assert prompt.phases.opens_in is Phase.ANSWER
    assert partial_text(format, ANSWER) == written
