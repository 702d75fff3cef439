"""Learns how a model talks from its chat template: probes are rendered and compared.

Nothing here knows a model or a template by name. What a probe can't show is not a fact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import meta, nodes

from palaver.errors import TemplateError
from palaver.formats.facts import Evidence, Facts, Switch, ThinkingMarkers
from palaver.formats.template import Template

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_QUESTION = "QUESTIONq7"
_THOUGHT = "THOUGHTq7"
_ANSWER = "ANSWERq7"
_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*\Z")
_CLOSER = re.compile(r"</[^<>\s]+>|\[/[^\[\]\s]+\]")
_GIVEN = {"messages", "tools", "add_generation_prompt", "documents", "strftime_now", "raise_exception"}

Probe = Mapping[str, Any]


class Teacher:
    """Renders probes with one template."""

    def __init__(self, template: Template, strings: Mapping[str, str]) -> None:
        self.template = template
        self._strings = dict(strings)

    def write(self, messages: list[dict[str, Any]], prompt: bool = False, **variables: Any) -> str | None:
        """What the template makes of it; None where it refuses."""
        given = {**self._strings, "messages": messages, "add_generation_prompt": prompt, **variables}
        try:
            return self.template.render(given)
        except TemplateError:
            return None

    def opening(self, **variables: Any) -> str | None:
        """What the generation prompt adds."""
        asked = [{"role": "user", "content": _QUESTION}]
        with_prompt, without = self.write(asked, True, **variables), self.write(asked, False, **variables)
        if with_prompt is None or without is None or not with_prompt.startswith(without):
            return None
        return with_prompt[len(without) :]

    def reply(self, message: Mapping[str, Any]) -> str | None:
        """What the template writes for an assistant's message that answers the question."""
        asked = [{"role": "user", "content": _QUESTION}]
        before = self.write(asked)
        whole = self.write([*asked, {"role": "assistant", **message}])
        if before is None or whole is None:
            return None
        return whole[len(_common(before, whole)) :]


def learn(template: Template, strings: Mapping[str, str], control: Mapping[str, int]) -> Facts:
    """`strings` are the tokenizer's named tokens (bos_token, ...), `control` its tokens by their text."""
    teacher = Teacher(template, strings)
    evidence: list[Evidence] = []
    field, markers = _thinking_by_field(teacher, evidence)
    if markers is None:
        markers = _thinking_by_split(teacher, evidence)
    switch = _switch(teacher, markers, evidence) if markers else None
    return Facts(field, markers, switch, _turn_ends(teacher, strings, control, evidence), tuple(evidence))


def _thinking_by_field(teacher: Teacher, evidence: list[Evidence]) -> tuple[str | None, ThinkingMarkers | None]:
    for field in REASONING_FIELDS:
        written = teacher.reply({"content": _ANSWER, field: _THOUGHT})
        if written is None or _THOUGHT not in written or _ANSWER not in written:
            continue
        before, rest = written.split(_THOUGHT, 1)
        closing = rest.split(_ANSWER, 1)[0]
        opener, closer = _TAG.search(before), _TAG.search(closing)
        evidence.append(Evidence(f"thinking is given as {field}", written))
        if opener and closer:
            return field, ThinkingMarkers(opener[1], closer[1], opener[0], closing)
        return field, None
    return None, None


def _thinking_by_split(teacher: Teacher, evidence: list[Evidence]) -> ThinkingMarkers | None:
    """A template that cuts thinking out of past contents shows its closing marker by what vanishes."""
    texts = [constant.value for constant in teacher.template.tree.find_all(nodes.Const) if type(constant.value) is str]
    texts += [data.data for data in teacher.template.tree.find_all(nodes.TemplateData)]
    for closer in dict.fromkeys(found for text in texts for found in _CLOSER.findall(text)):
        written = teacher.reply({"content": f"{_THOUGHT}{closer}{_ANSWER}"})
        if written is None or _THOUGHT in written or _ANSWER not in written:
            continue
        opener = closer.replace("/", "", 1)
        evidence.append(Evidence(f"past thinking up to {closer} is dropped", written))
        opening = teacher.opening() or ""
        at = opening.rfind(opener)
        return ThinkingMarkers(opener, closer, opening[at:] if at >= 0 else f"{opener}\n", f"\n{closer}\n\n")
    return None


def _switch(teacher: Teacher, markers: ThinkingMarkers, evidence: list[Evidence]) -> Switch | None:
    default = teacher.opening()
    for variable in sorted(meta.find_undeclared_variables(teacher.template.tree) - _GIVEN):
        on, off = teacher.opening(**{variable: True}), teacher.opening(**{variable: False})
        if on is None or off is None or on == off:
            continue
        if _thinks(on, markers) is not False and _thinks(off, markers) is False:
            evidence.append(Evidence(f"{variable} switches thinking", f"{default!r} / on {on!r} / off {off!r}"))
            return Switch(variable, True, False)
        if _thinks(on, markers) is True and _thinks(off, markers) is not True:
            evidence.append(Evidence(f"{variable} switches thinking", f"{default!r} / on {on!r} / off {off!r}"))
            return Switch(variable, True, False)
    return None


def _thinks(opening: str, markers: ThinkingMarkers) -> bool | None:
    """Whether the generation prompt opens a thought (True), closes it (False) or leaves it to the model."""
    opened, closed = opening.rfind(markers.opener), opening.rfind(markers.closer)
    if opened < 0 and closed < 0:
        return None
    return opened > closed


def _turn_ends(
    teacher: Teacher, strings: Mapping[str, str], control: Mapping[str, int], evidence: list[Evidence]
) -> tuple[str, ...]:
    """The first control token after an answer ends the turn, and so does the tokenizer's own end."""
    ends = [strings[name] for name in ("eos_token",) if strings.get(name)]
    written = teacher.reply({"content": _ANSWER})
    if written and _ANSWER in written:
        after = written.split(_ANSWER, 1)[1]
        evidence.append(Evidence("what follows an answer", after))
        found = min((text for text in control if text in after), key=after.index, default=None)
        if found is not None:
            ends.insert(0, found)
    return tuple(dict.fromkeys(ends))


def _common(first: str, second: str) -> str:
    size = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return first[: min(len(first), len(second)) if size is None else size]
