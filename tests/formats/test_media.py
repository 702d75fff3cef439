"""Media in rendered prompts: placeholders of templates, contents that look like them, and lists of parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from palaver.errors import UnsupportedContent
from palaver.formats.format import CompletionFormat, TemplateFormat
from palaver.formats.media import Placeholder
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.generation import ExpandedMedia, MediaExpansion, MediaItem, Prompt
from palaver.messages import Audio, Image, Message, Part, Role, Text, Video, assistant, user
from tests.tiny import TURNS, byte_level

PAD, OPEN, CLOSE, HEARD = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_pad|>"
TOKENIZER = FastTokenizer(byte_level((*TURNS, OPEN, CLOSE, PAD, HEARD)))
IDS = TOKENIZER.control
TYPED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'audio' %}<|audio_pad|>
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.strip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HOISTED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is not string %}{% for part in m.content if part.type == 'image' %}<picture>
{% endfor %}{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% else %}{{ m.content }}\
{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LISTS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% elif part.type == 'text' %}{{ part.text }}\
{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RED, BLUE = Image("image/png", b"red"), Image("image/png", b"blue")
TONE = Audio("audio/wav", b"tone")


def make(template: str) -> TemplateFormat:
    return TemplateFormat(Template(template), TOKENIZER, {"eos_token": "<|im_end|>"})


def expand(part: Image | Audio | Video, text: str = "", frame: str = "") -> list[ExpandedMedia]:
    """A picture takes as many placeholders as its data has bytes, between line breaks; a video is two pictures."""
    if isinstance(part, Video):
        return [one for number in "12" for one in expand(Image("image/png", part.data), frame=number)]
    kind = "audio" if isinstance(part, Audio) else "image"
    item = MediaItem(kind, part.data.decode() + frame, text)  # type: ignore[arg-type]
    pads = (IDS[HEARD if kind == "audio" else PAD],) * len(part.data)
    if kind == "audio":
        return [ExpandedMedia(item, MediaExpansion(pads))]
    line = tuple(TOKENIZER.encode(["\n"]))
    return [ExpandedMedia(item, MediaExpansion((*line, IDS[OPEN], *pads, IDS[CLOSE], *line, *line), 1, 2))]


def ask(*parts: Part | str) -> Message:
    return Message(Role.USER, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def text_of(prompt: Prompt) -> str:
    return b"".join(TOKENIZER.vocabulary[token_id] for token_id in prompt.context_ids).decode()


def seen(prompt: Prompt) -> list[tuple[str, str]]:
    """The content of each item, and the text at its place."""
    vocabulary = TOKENIZER.vocabulary
    ids = prompt.context_ids
    places = [(span.item.digest, ids[span.start : span.stop]) for span in prompt.media]
    return [(digest, b"".join(vocabulary[token_id] for token_id in part).decode()) for digest, part in places]


def picture_text(size: int) -> str:
    return OPEN + PAD * size + CLOSE


def test_placeholders_are_learned_from_the_template() -> None:
    assert make(TYPED).placeholders == {
        "image": Placeholder("image", OPEN + PAD + CLOSE),
        "audio": Placeholder("audio", HEARD),
    }
    assert make(HOISTED).placeholders == {"image": Placeholder("image", "<picture>")}
    assert make(PLAIN).placeholders == {}


@pytest.mark.parametrize("template", [TYPED, PLAIN, LISTS], ids=["typed", "plain", "lists"])
def test_items_stand_where_the_template_writes_them(template: str) -> None:
    prompt = make(template).render([ask("Is ", RED, " or ", BLUE, "?")], expand=expand)
    assert seen(prompt) == [("red", picture_text(3)), ("blue", picture_text(4))]
    first, second = (f"\n{picture_text(size)}\n\n" for size in (3, 4))
    assert f"user\nIs {first} or {second}?<|im_end|>" in text_of(prompt)


def test_a_template_may_write_pictures_before_the_text() -> None:
    prompt = make(HOISTED).render([ask("Is ", RED, " or ", BLUE, "?")], expand=expand)
    assert seen(prompt) == [("red", picture_text(3)), ("blue", picture_text(4))]
    assert text_of(prompt).index("Is  or ?") > prompt.media[1].start


def test_kinds_keep_their_order_and_a_video_is_its_frames() -> None:
    film = Video("video/mp4", b"film")
    prompt = make(TYPED).render([ask(TONE, RED, film), assistant("So?"), ask(TONE, "Yes.")], expand=expand)
    assert [digest for digest, _ in seen(prompt)] == ["tone", "red", "film1", "film2", "tone"]
    assert prompt.media == tuple(sorted(prompt.media, key=lambda span: span.start))


@pytest.mark.parametrize("template", [TYPED, PLAIN, HOISTED, LISTS], ids=["typed", "plain", "hoisted", "lists"])
def test_text_that_looks_like_a_placeholder_stays_text(template: str) -> None:
    liar = f"{OPEN}{PAD}{CLOSE}{PAD}<picture>{HEARD}"
    prompt = make(template).render([ask(liar, RED, liar), assistant(liar), ask(liar)], expand=expand)
    assert seen(prompt) == [("red", picture_text(3))]
    inside = range(prompt.media[0].start, prompt.media[0].stop)
    media_ids = {IDS[name] for name in (OPEN, CLOSE, PAD, HEARD)}
    strays = [place for place, token_id in enumerate(prompt.context_ids) if token_id in media_ids]
    assert strays == list(inside)
    assert text_of(prompt).count(liar) == 4


def test_marks_are_never_characters_of_the_contents() -> None:
    used = "".join(map(chr, range(0x100000, 0x100004)))
    prompt = make(PLAIN).render([ask(used, RED)], expand=expand)
    assert used in text_of(prompt)
    assert seen(prompt) == [("red", picture_text(3))]


def test_past_replies_keep_their_tokens_beside_pictures() -> None:
    format, reply = make(TYPED), (*TOKENIZER.encode(["Th", "e e", "nd"]), IDS["<|im_end|>"])
    messages: Sequence[Message] = [ask(RED, "What?"), assistant("The end"), ask(BLUE, "And now?")]
    prompt = format.render(messages, past_replies=[reply], expand=expand)
    assert [digest for digest, _ in seen(prompt)] == ["red", "blue"]
    assert reply in [prompt.context_ids[at : at + len(reply)] for at in range(len(prompt.context_ids))]
    first = format.render(messages[:1], expand=expand)
    assert prompt.context_ids[: len(first)] == first.context_ids
    assert prompt.media[0] == first.media[0]


def test_a_template_that_takes_lists_only_gets_lists() -> None:
    prompt = make(LISTS).render([user("Hello"), assistant("Hi."), user("Well?")])
    assert "user\nHello<|im_end|>" in text_of(prompt)
    assert "assistant\nHi.<|im_end|>" in text_of(prompt)


def test_media_are_refused_without_a_model_that_takes_them() -> None:
    with pytest.raises(UnsupportedContent, match="text only, not image"):
        make(TYPED).render([ask(RED)])
    with pytest.raises(UnsupportedContent, match="text only, not image"):
        CompletionFormat(TOKENIZER).render([ask("Hm", RED)])


def test_a_template_that_drops_a_picture_is_found() -> None:
    only_last = TYPED.replace("{%- for m in messages %}", "{%- for m in messages[-1:] %}")
    with pytest.raises(UnsupportedContent, match="does not write every image"):
        make(only_last).render([ask(RED), assistant("Hm."), ask("Well?")], expand=expand)
