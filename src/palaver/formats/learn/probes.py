"""Probes: small conversations that are rendered to see what a template does with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from jinja2 import meta, nodes

from palaver.errors import TemplateError
from palaver.formats.facts import Facts
from palaver.formats.learn.template_variables import TemplateVariable, template_variables
from palaver.formats.markers import CONTROL_LIKE, common_end, common_start
from palaver.formats.template import MAX_STEPS, HostileTemplate, OutOfFuel, Template
from palaver.formats.tool_calls.samples import sample_calls, sample_tools

QUESTION, THOUGHT, ANSWER, RESULT = "QUESTIONq7", "THOUGHTq7", "ANSWERq7", "RESULTq7"
WORD, NUMBER = "WORDq7", 47117
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "reasoning_text")
_GIVEN = {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception", "bos_token", "eos_token",
          "pad_token", "unk_token"}  # fmt: skip


class Prober:
    """Renders probes with one template."""

    def __init__(self, template: Template, strings: Mapping[str, str]) -> None:
        self.template = template
        self._strings = dict(strings)
        self._seen: dict[str, str | None] = {}
        self._steps = 0
        self.no_tools = "null"
        self.no_tools = next((how for how in NO_TOOLS if self._works_with(how)), "null")

    def _works_with(self, no_tools: str) -> bool:
        self.no_tools = no_tools
        return self.write([probe_messages()], True) is not None

    def _plain(self) -> dict[str, Any]:
        return {"datetime": "Jan 01 2024", **no_tool_variables(self.no_tools)}

    def write(self, messages: list[dict[str, Any]], prompt: bool = False, **variables: Any) -> str | None:
        """What the template makes of it; None where it refuses."""
        given = {**self._strings, "messages": messages, "add_generation_prompt": prompt, **self._plain(), **variables}
        if variables.get("tools"):
            given["functions"] = json.dumps(variables["tools"], indent=4)
        key = repr((messages, prompt, self.no_tools, sorted(variables.items(), key=lambda item: item[0])))
        if key not in self._seen:
            self._seen[key] = self._rendered(given)
        return self._seen[key]

    def _rendered(self, given: Mapping[str, Any]) -> str | None:
        try:
            return self.template.render(given)
        except HostileTemplate:
            raise
        except TemplateError:
            return None
        finally:
            self._steps += self.template.steps
            if self._steps > MAX_STEPS:
                raise HostileTemplate(self.template.name, None, f"a few probes took more than {MAX_STEPS} steps")

    def opening(self, **variables: Any) -> str | None:
        """What the generation prompt adds."""
        with_prompt, without = (
            self.write([probe_messages()], True, **variables),
            self.write([probe_messages()], False, **variables),
        )
        if with_prompt is None or without is None:
            return None
        return with_prompt[len(common_start(without, with_prompt)) :] or self._always(without, **variables)

    def _always(self, before: str, **variables: Any) -> str:
        """What a template adds for the next reply whether asked to or not."""
        whole = self.write([probe_messages(), {"role": "assistant", "content": ANSWER}], **variables) or ""
        added = common_end(before, whole)
        tags = list(CONTROL_LIKE.finditer(added))
        ends = [tag.end() for tag in tags if "END_OF_TURN" in tag[0] or tag[0].startswith("</")]
        return added[ends[0] :] if ends and ends[0] < len(added) else (added if len(tags) > 1 else "")

    def reply(self, message: Mapping[str, Any], **variables: Any) -> str | None:
        """What the template writes for an assistant's message that answers the question."""
        before = self.write([probe_messages()], **variables)
        whole = self.write([probe_messages(), {"role": "assistant", **message}], **variables)
        if whole is None:
            return None
        if before is None:
            return whole[whole.rfind(QUESTION) + len(QUESTION) :]
        always = (
            self._always(before, **variables) if self.write([probe_messages()], True, **variables) == before else ""
        )
        shared = common_start(before.removesuffix(always), whole)
        behind = before[len(shared) :]
        if not always and behind and whole.endswith(behind) and len(whole) > len(before):
            return self._inserted(whole, len(shared), len(whole) - len(behind), **variables)
        return whole[len(shared) :].removesuffix(always)

    def _inserted(self, whole: str, start: int, end: int, **variables: Any) -> str:
        """A reply before something that always comes last, such as a list of tools: both may begin alike, so that
        where the reply begins shows only in how the generation prompt opens it."""
        opening = self.opening(**variables) or ""
        at = start
        while opening and at > 0 and not whole.startswith(opening, at) and whole[at - 1] == whole[at - 1 + end - start]:
            at -= 1
        return whole[at : at + end - start] if opening and whole.startswith(opening, at) else whole[start:end]

    def followed(self, content: str = ANSWER) -> str | None:
        """An answer with another question behind it: some templates treat only such turns as past."""
        whole = self.write([probe_messages(), {"role": "assistant", "content": content}, probe_messages()])
        return None if whole is None else whole.partition(QUESTION)[2]

    def lead(self, message: Mapping[str, Any], mark: str, frame: str = "", **variables: Any) -> str:
        """The white space that a reply begins with behind the generation prompt, as the template writes it, or the
        frame of an empty answer."""
        lead = self.between(message, mark, **variables)
        return lead if lead is not None and lead.strip() in ("", frame) else ""

    def between(self, message: Mapping[str, Any], mark: str, **variables: Any) -> str | None:
        """What the template writes between its generation prompt and a mark in the reply; None where the reply does
        not begin with the generation prompt."""
        prompt = self.write([probe_messages()], True, **variables)
        whole = self.write([probe_messages(), {"role": "assistant", **message}], **variables)
        if prompt is None or whole is None or not whole.startswith(prompt) or mark not in whole[len(prompt) :]:
            return None
        return whole[len(prompt) : whole.index(mark, len(prompt))]

    def call_reply(self, count: int, as_text: bool, arguments: dict[str, Any] | None = None) -> str | None:
        """What the template writes for tool calls; tried in the ways that templates differ in."""
        for content in ("", None):
            message = {"content": content, "tool_calls": sample_calls(count, as_text, arguments)}
            written = self.reply(message, tools=sample_tools())
            if written is not None:
                return written
        return None

    def variables(self) -> list[str]:
        """The names the template asks for beside those everybody gives."""
        return sorted(meta.find_undeclared_variables(self.template.tree) - _GIVEN)

    @cached_property
    def inputs(self) -> tuple[TemplateVariable, ...]:
        """Those of them that the template does not set for its own ends, with what its syntax tells of each."""
        try:
            return template_variables(self.template.tree, _GIVEN)
        except OutOfFuel as error:
            raise HostileTemplate(self.template.name, None, str(error)) from None

    def variations(self) -> Iterator[dict[str, Any]]:
        """Every variable on and off, and with each value that the template itself names."""
        for given in self.inputs:
            named = (value for value in (*given.values, *given.defaults) if value is not None)
            for value in {repr(value): value for value in (True, False, *named)}.values():
                yield {given.name: value}

    def texts(self) -> Iterator[str]:
        """Every piece of text in the template's syntax tree."""
        for constant in self.template.tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                yield constant.value
        for data in self.template.tree.find_all(nodes.TemplateData):
            yield data.data


NO_TOOLS = ("null", "empty", "absent")


def no_tool_variables(how: str) -> dict[str, Any]:
    """What a template is given where no tools are offered."""
    if how == "absent":
        return {}
    return {"tools": None if how == "null" else [], "functions": ""}


def tool_variables(facts: Facts, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """The tools as the template takes them."""
    if not schemas:
        return no_tool_variables(facts.no_tools)
    functions = {"functions": json.dumps(schemas, indent=4)} if "functions" in facts.asks_for else {}
    return {"tools": schemas, **functions}


def probe_messages() -> dict[str, Any]:
    return {"role": "user", "content": QUESTION}


def thinking_message(field: str | None) -> dict[str, Any]:
    """An assistant's message with a thought, given as the template takes it."""
    typed = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
    message: dict[str, Any] = {"role": "assistant", "content": typed if field == "content" else ANSWER}
    return message if field in (None, "content") else {**message, str(field): THOUGHT}
