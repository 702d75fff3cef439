"""The fast renderer gives the very text of the shipped chat template."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from training.conversations import Message, Sample
from training.mixture import samples
from training.phrasings import Split
from training.rendering import render, render_prompt

TEMPLATE = Path(__file__).parents[2] / "src/palaver/models/sprout/chat_template.jinja"


def as_dict(message: Message, spelt: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content or None}
    if message.role == "assistant":
        found["reasoning_content"] = message.thinking
    if message.calls:
        found["tool_calls"] = [_call(call.name, dict(call.arguments), spelt) for call in message.calls]
    return found


def _call(name: str, arguments: dict[str, Any], spelt: bool) -> dict[str, Any]:
    given = json.dumps(arguments, ensure_ascii=False) if spelt else arguments
    return {"type": "function", "function": {"name": name, "arguments": given}}


def by_template(sample: Sample, template: str, spelt: bool, **options: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[[as_dict(message, spelt) for message in sample.messages]],
        tools=[dict(tool) for tool in sample.tools] or None,
        chat_template=template,
        **options,
    )
    return str(rendered[0])


@pytest.mark.parametrize("split", list(Split))
def test_prompts_equal_the_template(split: Split) -> None:
    template = TEMPLATE.read_text()
    for at, sample in enumerate(islice(samples(3, 0, split, ()), 600)):
        *history, _ = sample.messages
        prompt = render_prompt(history, sample.tools, sample.thinks, sample.terminal)
        asked = Sample(tuple(history), sample.tools, sample.thinks)
        options = {"terminal": sample.terminal} | ({"enable_thinking": False} if not sample.thinks else {})
        assert prompt == by_template(asked, template, at % 2 == 0, add_generation_prompt=True, **options)


def test_whole_conversations_equal_the_template() -> None:
    template = TEMPLATE.read_text()
    for sample in islice(samples(4, 0, Split.TRAIN, ()), 400):
        if sample.thinks:
            assert "".join(render(sample)) + "\n" == by_template(
                sample, template, False, add_generation_prompt=False, terminal=sample.terminal
            )


def test_past_thinking_is_dropped() -> None:
    history = (Message("user", "a"), Message("assistant", "b", "secret"), Message("user", "c"))
    assert "secret" not in render_prompt(history, (), True)


def test_thinking_written_inside_the_content_is_read() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}]
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=TEMPLATE.read_text())
    assert rendered[0].endswith("<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>\n")
