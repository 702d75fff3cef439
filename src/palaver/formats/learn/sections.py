"""Sections named by text between control tokens: `<|open|>think<|sep|> ... <|close|>think<|sep|>`.

The learner reads such a template as if the sections were tags, `<think> ... </think>`, and the learned facts are
written back with the control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from palaver.formats.facts import Facts, SectionTags, facts_from_json, facts_to_json
from palaver.formats.learn.probes import ANSWER, Prober
from palaver.formats.markers import CONTROL_LIKE

_BEFORE = re.compile(rf"(?P<open>{CONTROL_LIKE.pattern})(?P<name>\w[\w-]*)(?P<end>{CONTROL_LIKE.pattern})\s*\Z")
_MARKERS = frozenset(
    "header answer_opening answer_closing called_text_opening called_text_closing turn_ends calls space_before_calls "
    "space_after_thought evidence".split()
)
"""The facts that hold markers, beside those of thinking."""


def find_sections(prober: Prober) -> SectionTags | None:
    """The control tokens of sections, if an answer stands in one that is closed under its own name."""
    before, found, after = (prober.reply({"content": ANSWER}) or "").partition(ANSWER)
    opened = _BEFORE.search(before) if found else None
    if opened is None:
        return None
    name, end = re.escape(opened["name"]), re.escape(opened["end"])
    closed = re.match(rf"\s*(?P<close>{CONTROL_LIKE.pattern}){name}{end}", after)
    if closed is None or closed["close"] == opened["open"]:
        return None
    return SectionTags(opened["open"], closed["close"], opened["end"])


def as_tags(sections: SectionTags) -> Callable[[str], str]:
    """Rewrites text with sections to text with tags."""
    end = re.escape(sections.end)
    tag = re.compile(f"({re.escape(sections.open)}|{re.escape(sections.close)})([^<>]*?){end}")
    return lambda text: tag.sub(lambda found: f"{'<' if found[1] == sections.open else '</'}{found[2]}>", text)


def restore_facts(facts: Facts, sections: SectionTags) -> Facts:
    """The facts that were learned from tags, written with the control tokens of the sections."""
    values = facts_to_json(facts)
    restored = {key: _restore(value, sections) if key in _MARKERS else value for key, value in values.items()}
    thinking = facts.thinking
    if thinking is not None:
        restored["thinking"] = {
            **values["thinking"],
            "opening": _restore(thinking.opening, sections),
            "closing": _restore(thinking.closing, sections),
            "closing_marker": _restore(thinking.closer, sections),
        }
    return replace(facts_from_json(restored), sections=sections)


def _restore(value: Any, sections: SectionTags) -> Any:
    if isinstance(value, dict):
        return {key: _restore(inner, sections) for key, inner in value.items()}
    if isinstance(value, list):
        return [_restore(inner, sections) for inner in value]
    if not isinstance(value, str):
        return value
    marks = {"</": sections.close, "<": sections.open, ">": sections.end}
    return re.sub(r"<\|[^<>|]*\|>|</|<|>", lambda found: marks.get(found[0], found[0]), value)
