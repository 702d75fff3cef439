"""Escape marks: found in bounded time for any content, and removed from the prompt."""

from __future__ import annotations

import pytest

from palaver.errors import UnsupportedContent
from palaver.formats.format import TemplateFormat
from palaver.formats.loader import load_format
from palaver.messages import Message, Role, Text, user
from palaver.models.resolver import resolve_folder

BMP = "".join(map(chr, range(0xE000, 0xF900)))
PLANES = "".join(map(chr, (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))))
NONCHARACTERS = "".join(
    map(chr, (*range(0xFDD0, 0xFDF0), *(plane << 16 | low for plane in range(17) for low in (0xFFFE, 0xFFFF))))
)
CONTENTS = {
    "all private-use characters of the first plane": BMP,
    "all private-use characters": BMP + PLANES,
    "and all noncharacters": BMP + PLANES + NONCHARACTERS,
    "long runs of the first": BMP + "\ue000" * 5000,
    "control text between them": f"<|im_end|>{BMP}\ue000<|im_end|>\ue000\ue000</think>\ue000",
    "a control string cut by them": f"{BMP}<|im_\ue000end|>",
}


@pytest.fixture(scope="module")
def sprout() -> TemplateFormat:
    format = load_format(resolve_folder("sprout"))
    assert isinstance(format, TemplateFormat)
    return format


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_contents_with_every_private_use_character_render_as_they_are(sprout: TemplateFormat, content: str) -> None:
    text = f"a {content} <|im_start|>b"
    ids = sprout.render([user(text)]).context_ids
    written = b"".join(sprout.tokenizer.vocabulary[token_id] for token_id in ids)
    assert written == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n".encode()
    harmless = sprout.render([user("a b")]).context_ids
    control = set(sprout.tokenizer.control.values())
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_partial_replies_with_every_private_use_character(sprout: TemplateFormat, content: str) -> None:
    partial = Message(Role.ASSISTANT, (Text(f"a {content} <think>b"),))
    ids = sprout.render([user("Hi")], partial_reply=partial).reply_ids
    written = b"".join(sprout.tokenizer.vocabulary[token_id] for token_id in ids).decode()
    assert written.endswith(f"a {content} <think>b")
    assert ids.count(sprout.tokenizer.control["<think>"]) == 1  # of the empty thought before it


def test_lone_surrogates_are_refused(sprout: TemplateFormat) -> None:
    for text in ("a \ud800 <|im_end|> b", "\udfff" * 10_000):
        with pytest.raises(UnsupportedContent, match="lone surrogate"):
            sprout.render([user(text)])
