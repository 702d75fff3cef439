"""Histories and partial replies: past thinking, tool arguments, response prefixes, dates, token ids of past replies."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from palaver.errors import UnsupportedContent
from palaver.events import PhaseOpened, fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.messages import Message, Role, Text, Thinking, ToolCall, assistant, tool, user
from palaver.phases import Phase
from tests.formats.families import FAMILIES, STRINGS, TOOLS, TURNS, Family, Kind, framed, make_format
from tests.tiny import byte_level

PLAIN = RenderOptions()
PAST = [user("a"), assistant("b", thinking="HIDDEN"), user("c")]


def render_text(
    family: Family, messages: list[Message], options: RenderOptions = PLAIN, partial: Message | None = None
) -> str:
    format, pieces = make_format(family)
    prompt = format.render(messages, TOOLS if family.calls else (), options, partial_reply=partial)
    return pieces.text((*prompt.context_ids, *prompt.reply_ids))


@pytest.mark.parametrize("name", ["tags, self-opened", "tags, opened by the prompt", "JSON in tags"])
def test_past_thinking_is_dropped_or_kept_as_the_template_says(name: str) -> None:
    family = FAMILIES[name]
    facts = make_format(family)[0].facts
    assert not facts.keeps_thinking
    assert facts.keeping
    assert facts.keeping.name == "keep_thinking"
    assert "HIDDEN" not in render_text(family, PAST)
    assert "HIDDEN" in render_text(family, PAST, RenderOptions(variables={"keep_thinking": True}))
    always = Family("keeps", family.source.replace("keep_thinking", "true"), family.markers, ())
    assert make_format(always)[0].facts.keeps_thinking
    assert "<think>\nHIDDEN\n</think>\n\nb" in render_text(always, PAST)


@pytest.mark.parametrize(("thinks", "end"), [(None, "<think>\n"), (True, "<think>\n"), (False, "</think>\n\n")])
def test_a_fresh_thought_is_opened_behind_any_history(thinks: bool | None, end: str) -> None:
    family = FAMILIES["tags, opened by the prompt"]
    for history in ([user("a")], PAST, [user("a"), assistant("b"), user("c")]):
        options = RenderOptions(thinking=thinks)
        assert render_text(family, history, options).endswith(f"<|bot|>{end}" if thinks is not False else end)
        opens = make_format(family)[0].render(history, options=options).phases.opens_in
        assert opens is (Phase.ANSWER if thinks is False else Phase.THINKING)


def test_typed_parts_take_past_thinking() -> None:
    assert "[THINK]HIDDEN[/THINK]b" in render_text(FAMILIES["typed parts"], PAST)


def test_bos_is_never_doubled() -> None:
    spec = json.loads(byte_level(special=TURNS, added=()))
    bos = next(token["id"] for token in spec["added_tokens"] if token["content"] == "<|bos|>")
    special = {"<|bos|>": {"id": "<|bos|>", "ids": [bos], "tokens": ["<|bos|>"]}}
    single = [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    spec["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    tokenizer = FastTokenizer(json.dumps(spec))
    assert tokenizer.prefix == (bos,)
    for source in (framed(), framed().replace("{{- bos_token }}", "")):
        ids = TemplateFormat(Template(source), tokenizer, STRINGS).render([user("x")]).context_ids
        assert ids.count(bos) == ("bos_token" in source)


def test_arguments_become_objects_and_what_can_not_be_parsed_stays_text() -> None:
    history = [
        user("a"),
        assistant(calls=(ToolCall("i", "look_up", '{"word":"x"}'),)),
        tool("i", "r", "look_up"),
        user("b"),
    ]
    assert '"arguments": {"word": "x"}' in render_text(FAMILIES["JSON in tags"], history)
    history[1] = assistant(calls=(ToolCall("i", "look_up", '{"word":"x'),))
    assert json.dumps('{"word":"x') in render_text(FAMILIES["JSON in tags"], history)
    text = FAMILIES["JSON in tags"].source.replace("c.function.arguments | tojson", "c.function.arguments")
    as_text = Family("arguments as text", text, FAMILIES["JSON in tags"].markers, (), "json_calls")
    assert make_format(as_text)[0].facts.arguments_as_text
    history[1] = assistant(calls=(ToolCall("i", "look_up", '{"word":"x"}'),))
    assert '"arguments": {"word":"x"}' in render_text(as_text, history)


def test_the_day_is_fixed_and_may_be_given() -> None:
    family = Family("dated", "{{ strftime_now('%Y-%m-%d') }}" + framed(), (), ())
    assert render_text(family, [user("x")]) == render_text(family, [user("x")])
    assert "2031-02-03" in render_text(family, [user("x")], RenderOptions(now=datetime(2031, 2, 3)))


def test_generation_blocks_render_as_their_content() -> None:
    source = framed().replace("{{- m.content or '' }}", "{%- generation %}{{- m.content or '' }}{%- endgeneration %}")
    assert render_text(Family("blocks", source, (), ()), PAST).count("<|bot|>b<|done|>") == 1


@pytest.mark.parametrize("kind", Kind)
def test_markers_in_the_response_prefix_count(kind: Kind) -> None:
    format, pieces = make_format(FAMILIES["tags, self-opened"], kind)
    options = RenderOptions(response_prefix="<think>\nI see")
    prompt = format.render([user("x")], options=options)
    reader = format.reader(prompt, options=options)
    events = reader.open()
    assert PhaseOpened(Phase.THINKING) in events
    events += [*reader.feed(pieces.piece(" it")), *reader.close()]
    assert fold(events).message == Message(Role.ASSISTANT, (Thinking("I see it"),))


def test_control_text_in_a_partial_reply_is_text() -> None:
    format, pieces = make_format(FAMILIES["tags, self-opened"], Kind.SPECIAL)
    partial = Message(Role.ASSISTANT, (Thinking("why </think> <|done|>"), Text("so <think>")))
    ids = format.render([user("x")], partial_reply=partial).reply_ids
    control = [i for i in ids if i in set(pieces.control.values())]
    assert control == [pieces.control["<think>"], pieces.control["</think>"]]


@pytest.mark.parametrize("name", ["no thinking", "JSON list", "Python calls"])
def test_a_thought_is_not_continued_where_there_is_no_thinking(name: str) -> None:
    with pytest.raises(UnsupportedContent, match="no thinking"):
        render_text(FAMILIES[name], [user("x")], partial=assistant(thinking="hm"))


def test_a_call_is_not_continued_where_there_are_no_calls() -> None:
    with pytest.raises(UnsupportedContent, match="no tool calls"):
        render_text(FAMILIES["no thinking"], [user("x")], partial=assistant(calls=(ToolCall("i", "f", ""),)))


@pytest.mark.timeout(60)
def test_the_search_for_past_replies_is_bounded() -> None:
    """Without the bound every header is compared with every reply, which takes minutes."""
    format, pieces = make_format(FAMILIES["JSON in tags"])
    turns = [message for number in range(8_000) for message in (user("a"), assistant(f"b{number}"))]
    past_replies = [[pieces.piece(f"edited {number}"), pieces.piece(" since")] for number in range(8_000)]
    messages = [*turns, user("c")]
    assert format.render(messages, past_replies=past_replies).context_ids == format.render(messages).context_ids
