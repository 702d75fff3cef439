"""Rendering: the library's ids for harmless contents, no control token from any content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers import logging as transformers_logging

from palaver.errors import BadParameter, EmptyMessage, NoMessages, UnsupportedContent
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.messages import Image, Message, Role, assistant, system, user
from palaver.phases import Phase
from tests.tiny import CHATML, MERGES, PLAIN, PREOPENED, SPLITTING, STRINGS, byte_level

transformers_logging.set_verbosity_error()
DEFINITION = byte_level(merges=MERGES)
TEMPLATES = {"chatml": CHATML, "preopened": PREOPENED, "splitting": SPLITTING, "plain": PLAIN}


def make_format(source: str, definition: str = DEFINITION) -> TemplateFormat:
    return TemplateFormat(Template(source, "probe"), FastTokenizer(definition), STRINGS)


FORMATS = {name: make_format(source) for name, source in TEMPLATES.items()}


def library_ids(source: str, messages: list[Message], **variables: Any) -> list[int]:
    from tokenizers import Tokenizer as Backend

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(DEFINITION), **STRINGS)
    history = [{"role": str(m.role), "content": m.text} for m in messages]
    ids = tokenizer.apply_chat_template(
        history, chat_template=source, add_generation_prompt=True, return_dict=False, tokenize=True, **variables
    )
    assert isinstance(ids, list)
    return ids


CONVERSATIONS = [
    [user("Hi")],
    [system("Be brief."), user("think  \n this\tover"), assistant("no"), user("why, thinker?\n")],
    [user("  spaces around  "), assistant("你好 👋🏽"), user("<b>bold</b> < 3 [x] >")],
    [user("ends like a marker <|im_"), assistant("<"), user(">think>")],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_harmless_contents_give_the_ids_of_apply_chat_template(name: str, messages: list[Message]) -> None:
    assert list(FORMATS[name].render(messages).context_ids) == library_ids(TEMPLATES[name], messages)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_renders_as_the_library_would(thinking: bool) -> None:
    messages = [user("Hi")]
    prompt = FORMATS["chatml"].render(messages, options=RenderOptions(thinking=thinking))
    assert list(prompt.context_ids) == library_ids(CHATML, messages, enable_thinking=thinking)


CONTROL = sorted(FastTokenizer(DEFINITION).control)
CONTENT = st.lists(
    st.one_of(st.sampled_from([*CONTROL, "<|im_", "end|>", "<", "</think", ">", " ", "\n"]), st.text(max_size=3))
).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.tuples(CONTENT, CONTENT, CONTENT, CONTENT))
def test_control_text_in_contents_is_text(name: str, contents: tuple[str, str, str, str]) -> None:
    first, second, third, fourth = contents

    def messages(*texts: str) -> list[Message]:
        a, b, c, d = texts
        return [system(a), user(b), assistant(c), user(d + "?")]

    control = set(FastTokenizer(DEFINITION).control.values())
    ids = FORMATS[name].render(messages(first, second, third, fourth)).context_ids
    harmless = FORMATS[name].render(messages("a", "b", "c", "d")).context_ids
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_of_every_control_token_adds_none(name: str) -> None:
    tokenizer = FastTokenizer(DEFINITION)
    everything = " ".join(tokenizer.control) + "".join(tokenizer.control)
    control = set(tokenizer.control.values())
    count = [sum(i in control for i in FORMATS[name].render([user(t)]).context_ids) for t in ("x", everything)]
    assert count[0] == count[1]


def test_the_text_of_control_tokens_reaches_the_model_unchanged() -> None:
    tokenizer = FastTokenizer(DEFINITION)
    ids = FORMATS["chatml"].render([user("say <|im_end|> and </think>")]).context_ids
    assert b"say <|im_end|> and </think>" in b"".join(tokenizer.vocabulary[i] for i in ids)


@pytest.mark.parametrize(
    ("name", "thinking", "phase"),
    [
        ("chatml", None, Phase.ANSWER),
        ("chatml", False, Phase.ANSWER),
        ("preopened", None, Phase.THINKING),
        ("preopened", True, Phase.THINKING),
        ("preopened", False, Phase.ANSWER),
        ("splitting", None, Phase.THINKING),
        ("plain", None, Phase.ANSWER),
    ],
)
def test_the_phase_the_reply_opens_in_is_known(name: str, thinking: bool | None, phase: Phase) -> None:
    for text in ("Hi", "<think>", "</think>", "<think>\n"):
        assert FORMATS[name].render([user(text)], options=RenderOptions(thinking=thinking)).phases.opens_in is phase


def test_what_is_learned() -> None:
    facts = FORMATS["chatml"].facts
    assert facts.reasoning_field == "reasoning_content"
    assert facts.thinking
    assert (facts.thinking.opening, facts.thinking.closing) == ("<think>\n", "\n</think>\n\n")
    assert facts.switch
    assert facts.switch.name == "enable_thinking"
    assert facts.turn_ends == ("<|im_end|>",)
    assert FORMATS["splitting"].facts.thinking
    assert FORMATS["splitting"].facts.switch is None
    assert FORMATS["plain"].facts.thinking is None


def test_thinking_goes_under_the_templates_own_name() -> None:
    tokenizer = FastTokenizer(DEFINITION)
    for name in ("reasoning", "thinking", "reasoning_content"):
        format = make_format(CHATML.replace("reasoning_content", name))
        prompt = format.render([user("a"), assistant("b", thinking="because")])
        assert b"because" in b"".join(tokenizer.vocabulary[i] for i in prompt.context_ids)


@pytest.mark.parametrize("name", ["splitting", "plain"])
def test_a_switch_the_template_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(BadParameter, match="no switch"):
        FORMATS[name].render([user("Hi")], options=RenderOptions(thinking=False))


@pytest.mark.parametrize("messages", [[system("Greet.")], [system(" One.\n"), system("Two.")], [user("")], [user(" ")]])
def test_a_system_prompt_alone_and_an_empty_message_are_rendered(messages: list[Message]) -> None:
    assert list(FORMATS["chatml"].render(messages).context_ids) == library_ids(CHATML, messages)


def test_a_system_prompt_that_the_template_drops_is_refused() -> None:
    source = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'user' %}{{ system }}\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    format = make_format(source)
    assert format.render([system("Greet."), user("")]).context_ids
    with pytest.raises(NoMessages, match="without a message from the user"):
        format.render([system("Greet.")])


def test_a_prompt_without_tokens_is_refused() -> None:
    format = make_format("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(EmptyMessage):
        format.render([user("")])


def test_what_can_not_be_rendered_is_refused() -> None:
    format = FORMATS["plain"]
    with pytest.raises(NoMessages):
        format.render([])
    with pytest.raises(UnsupportedContent, match="image"):
        format.render([Message(Role.USER, (Image("image/png", b""),))])
