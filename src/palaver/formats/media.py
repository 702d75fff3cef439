"""Media in prompts: how a chat template writes pictures and sounds, and their tokens in the rendered text.

A template is shown a message with and without a part, and what it writes more is the part's placeholder. In a rendered
text each placeholder of the template becomes a mark, one character that occurs nowhere else, and after tokenization the
mark becomes the tokens that the model's processor writes for the item. Contents can't contain a placeholder: control
text in them is escaped. For a template that knows no parts, the mark itself is written into the content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palaver.errors import TemplateError, UnsupportedContent
from palaver.formats.markers import common_end, common_start, match_any
from palaver.formats.template import HostileTemplate, Template
from palaver.formats.tokenizer import Run, Tokenizer
from palaver.generation import ExpandedMedia, MediaSpan
from palaver.messages import Audio, Image, Message, Text, ToolResult, Video
from palaver.phases import Vocabulary

ExpandMedia = Callable[[Image | Audio | Video], Sequence[ExpandedMedia]]
"""Expands a part for the model: one item for a picture or a sound, several for a video."""
PART_TYPES = {"image": ("image", "image_url"), "audio": ("audio", "input_audio", "audio_url")}
"""The types of parts that templates know, by kind of media."""
_MARKS = range(0x100000, 0x10FFF0)
_BEFORE, _AFTER = "Qzbefore", "Qzafter"


@dataclass(frozen=True, slots=True)
class Placeholder:
    part_type: str
    """The type of the part, as the template knows it."""
    text: str
    """What the template writes for it, without plain text at both ends."""


def find_placeholders(template: Template, strings: Mapping[str, str], control: Iterable[str]) -> dict[str, Placeholder]:
    """What the template writes for parts, by kind of media."""
    found = {}
    for kind, types in PART_TYPES.items():
        placeholders = (_find_placeholder(template, strings, control, part_type) for part_type in types)
        placeholder = next((one for one in placeholders if one is not None), None)
        if placeholder is not None:
            found[kind] = placeholder
    return found


def _find_placeholder(
    template: Template, strings: Mapping[str, str], control: Iterable[str], part_type: str
) -> Placeholder | None:
    texts = [{"type": "text", "text": _BEFORE}, {"type": "text", "text": _AFTER}]
    without = _render(template, strings, texts)
    written = _render(template, strings, [texts[0], {"type": part_type}, texts[1]])
    if without is None or written is None or len(written) <= len(without) or _AFTER not in without:
        return None
    start, added = len(common_start(written, without)), len(written) - len(without)
    if written[start + added :] != without[start:]:
        added = len(written) - start - len(common_end(written[start:], without[start:]))
    more = written[start : start + added]
    return Placeholder(part_type, _core(more, control)) if more.strip() else None


def find_result_media(
    template: Template,
    strings: Mapping[str, str],
    placeholders: Mapping[str, Placeholder],
    before: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
) -> frozenset[str]:
    """The kinds whose placeholders the template writes in the message of a tool result, after those `before`."""
    texts = [{"type": "text", "text": _BEFORE}, {"type": "text", "text": _AFTER}]
    found = set()
    for kind, placeholder in placeholders.items():
        content = [texts[0], {"type": placeholder.part_type}, texts[1]]
        written = _render_messages(template, strings, [*before, {**result, "content": content}])
        around = (written or "").partition(_BEFORE)[2].partition(_AFTER)[0]
        if around.strip().count(placeholder.text) == 1 and "'type'" not in around and '"type"' not in around:
            found.add(kind)
    return frozenset(found)


def _render(template: Template, strings: Mapping[str, str], content: list[dict[str, str]]) -> str | None:
    return _render_messages(template, strings, [{"role": "user", "content": content}])


def _render_messages(template: Template, strings: Mapping[str, str], messages: list[Any]) -> str | None:
    try:
        return template.render({**strings, "messages": messages, "add_generation_prompt": True})
    except HostileTemplate:
        raise
    except TemplateError:
        return None


def _core(text: str, control: Iterable[str]) -> str:
    """From the first control token to the last; without control tokens, the text without space at both ends."""
    found = list(match_any(control).finditer(text)) if control else []
    return text[found[0].start() : found[-1].end()] if found else text.strip()


class PromptMedia:
    """The media of one prompt, and the marks that stand for them in its text."""

    def __init__(
        self,
        messages: Sequence[Message],
        expand: ExpandMedia,
        placeholders: Mapping[str, Placeholder],
        tokenizer: Tokenizer,
    ) -> None:
        self._placeholders = placeholders
        self._tokenizer = tokenizer
        self._control_ids = frozenset(tokenizer.control.values())
        used: set[str] = set().union(*(set(text) for message in messages for text in _texts(message)))
        self._free_marks = (chr(code) for code in _MARKS if chr(code) not in used)
        self._by_mark: dict[str, ExpandedMedia] = {}
        self._unwritten: list[str] = []
        """The marks of items that the template itself writes a placeholder for, in order."""
        self._expand = expand

    def content(self, message: Message) -> list[dict[str, Any]] | str:
        """The content as the template takes it: typed parts, or text with marks if it knows no parts for these
        media."""
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            match part:
                case Text(text):
                    parts.append({"type": "text", "text": text})
                case ToolResult(_, content):
                    parts.append({"type": "text", "text": content})
                case Image() | Audio() | Video():
                    parts += [self._add(item) for item in self._expand(part)]
                case _:
                    pass
        if all("text" in part for part in parts):
            return "".join(part["text"] for part in parts)
        return _joined(parts)

    def _add(self, item: ExpandedMedia) -> dict[str, Any]:
        mark = next(self._free_marks)
        self._by_mark[mark] = item
        placeholder = self._placeholders.get(item.item.kind)
        if placeholder is None:
            return {"type": "text", "text": mark}
        self._unwritten.append(mark)
        return {"type": placeholder.part_type}

    def mark(self, text: str) -> str:
        """The rendered text with a mark for each placeholder, between the plain text that the processor writes."""
        waiting: dict[str, list[str]] = {}
        for mark in self._unwritten:
            waiting.setdefault(self._by_mark[mark].item.kind, []).append(mark)
        kinds = {self._placeholders[kind].text: kind for kind in waiting}
        pieces: list[str] = []
        at = 0
        for match in match_any(kinds).finditer(text) if kinds else ():
            marks = waiting[kinds[match[0]]]
            if marks:
                pieces += [text[at : match.start()], marks.pop(0)]
                at = match.end()
        left = [kind for kind, marks in waiting.items() if marks]
        if left:
            raise UnsupportedContent(f"The model's chat template does not write every {left[0]} of these messages.")
        marked = "".join([*pieces, text[at:]])
        return self._pattern.sub(lambda match: self._with_plain_text(match[0]), marked)

    def _with_plain_text(self, mark: str) -> str:
        ids, expansion = self._by_mark[mark].expansion.token_ids, self._by_mark[mark].expansion
        vocabulary: Vocabulary = self._tokenizer.vocabulary
        lead = b"".join(vocabulary[token_id] for token_id in ids[: expansion.lead])
        tail = b"".join(vocabulary[token_id] for token_id in ids[len(ids) - expansion.tail :])
        return lead.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")

    @property
    def _pattern(self) -> re.Pattern[str]:
        return match_any(self._by_mark)

    def encode(self, runs: Iterable[Run], start: int) -> tuple[list[int], list[MediaSpan]]:
        """The ids of the runs, and the places of the items in them, counted from `start`.

        Each mark is encoded as the first token of its item, a control token: the text around it is tokenized as it is
        around control tokens.
        """
        split = list(self._split(runs))
        stand_ins = [run if isinstance(run, str | int) else run.core[0] for run in split]
        items = [run for run in split if not isinstance(run, str)]
        encoded = self._tokenizer.encode(stand_ins)
        if sum(token_id in self._control_ids for token_id in encoded) != len(items):
            encoded = [i for run in stand_ins for i in self._tokenizer.encode([run])]
        ids: list[int] = []
        spans: list[MediaSpan] = []
        following = iter(items)
        for token_id in encoded:
            item = next(following) if token_id in self._control_ids else token_id
            if isinstance(item, ExpandedMedia):
                spans.append(MediaSpan(item.item, start + len(ids), len(item.core)))
                ids += item.core
            else:
                ids.append(token_id)
        return ids, spans

    def _split(self, runs: Iterable[Run]) -> Iterator[Run | ExpandedMedia]:
        for run in runs:
            if isinstance(run, int):
                yield run
                continue
            at = 0
            for match in self._pattern.finditer(run):
                if run[at : match.start()]:
                    yield run[at : match.start()]
                yield self._by_mark[match[0]]
                at = match.end()
            if run[at:]:
                yield run[at:]


def _texts(message: Message) -> Iterator[str]:
    for part in message.parts:
        if isinstance(part, Text):
            yield part.text
        elif isinstance(part, ToolResult):
            yield part.content


def _joined(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts with neighbouring texts joined."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and "text" in part and "text" in joined[-1]:
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined
