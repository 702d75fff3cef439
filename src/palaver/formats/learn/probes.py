"""Probes: small conversations that are rendered with a template to learn how it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from jinja2 import meta, nodes

from palaver.errors import TemplateError
from palaver.formats.facts import ThinkingFacts, no_tool_variables
from palaver.formats.learn.template_variables import TemplateVariable, template_variables
from palaver.formats.markers import CONTROL_LIKE, common_end, common_start
from palaver.formats.template import MAX_STEPS, HostileTemplate, OutOfFuel, Template
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools

QUESTION, THOUGHT, ANSWER, RESULT = "QUESTIONq7", "THOUGHTq7", "ANSWERq7", "RESULTq7"
WORD, NUMBER = "WORDq7", 47117
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "reasoning_text")
NO_TOOLS = ("null", "empty", "absent")
"""Values of `tools` that may mean no tools: null, an empty list, or the variable left out."""
_STANDARD_VARIABLES = frozenset(
    "messages tools add_generation_prompt strftime_now raise_exception bos_token eos_token pad_token unk_token".split()
)
"""The variables that every template gets."""


class Prober:
    """Renders probes with one template. Results are cached."""

    def __init__(self, template: Template, strings: Mapping[str, str]) -> None:
        self.template = template
        self._strings = dict(strings)
        self._cache: dict[str, str | None] = {}
        self._steps = 0
        self._rewrite: Callable[[str], str] = str
        self.no_tools = "null"
        self.no_tools = next((how for how in NO_TOOLS if self._accepts_no_tools(how)), "null")

    def rewrite_with(self, rewrite: Callable[[str], str]) -> None:
        """Applies a function to every rendered text from now on."""
        self._rewrite = rewrite
        self._cache.clear()

    def _accepts_no_tools(self, no_tools: str) -> bool:
        self.no_tools = no_tools
        return self.render([user_message()], True) is not None

    def _default_variables(self) -> dict[str, Any]:
        return {"datetime": "Jan 01 2024", **no_tool_variables(self.no_tools)}

    def render(self, messages: list[dict[str, Any]], prompt: bool = False, /, **variables: Any) -> str | None:
        """The rendered text; None if the template refuses. `prompt` adds the generation prompt."""
        standard = {**self._strings, "messages": messages, "add_generation_prompt": prompt}
        given = {**standard, **self._default_variables(), **variables}
        if variables.get("tools"):
            given["functions"] = json.dumps(variables["tools"], indent=4)
        key = repr((messages, prompt, self.no_tools, sorted(variables.items(), key=lambda item: item[0])))
        if key not in self._cache:
            text = self._render_uncached(given)
            self._cache[key] = None if text is None else self._rewrite(text)
        return self._cache[key]

    def _render_uncached(self, given: Mapping[str, Any]) -> str | None:
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

    def opening(self, /, **variables: Any) -> str | None:
        """The generation prompt."""
        with_prompt, without = (
            self.render([user_message()], True, **variables),
            self.render([user_message()], False, **variables),
        )
        if with_prompt is None or without is None:
            return None
        return with_prompt[len(common_start(without, with_prompt)) :] or self._fixed_opening(without, **variables)

    def _fixed_opening(self, before: str, /, **variables: Any) -> str:
        """The generation prompt of a template that always writes it."""
        whole = self.render([user_message(), {"role": "assistant", "content": ANSWER}], **variables) or ""
        added = common_end(before, whole)
        tags = list(CONTROL_LIKE.finditer(added))
        ends = [tag.end() for tag in tags if "END_OF_TURN" in tag[0] or tag[0].startswith("</")]
        return added[ends[0] :] if ends and ends[0] < len(added) else (added if len(tags) > 1 else "")

    def reply(self, message: Mapping[str, Any], /, **variables: Any) -> str | None:
        """The rendered text of an assistant's message that answers the question."""
        before = self.render([user_message()], **variables)
        whole = self.render([user_message(), {"role": "assistant", **message}], **variables)
        if whole is None:
            return None
        if before is None:
            return whole[whole.rfind(QUESTION) + len(QUESTION) :]
        writes_prompt_always = self.render([user_message()], True, **variables) == before
        opening = self._fixed_opening(before, **variables) if writes_prompt_always else ""
        shared = common_start(before.removesuffix(opening), whole)
        tail = before[len(shared) :]
        if not opening and tail and whole.endswith(tail) and len(whole) > len(before):
            return self._inserted(whole, len(shared), len(whole) - len(tail), **variables)
        return whole[len(shared) :].removesuffix(opening)

    def _inserted(self, whole: str, start: int, end: int, /, **variables: Any) -> str:
        """A reply before a text that always comes last, such as a list of tools. Both may start alike, so the start of
        the reply is found by the generation prompt."""
        opening = self.opening(**variables) or ""
        at = start
        while opening and at > 0 and not whole.startswith(opening, at) and whole[at - 1] == whole[at - 1 + end - start]:
            at -= 1
        return whole[at : at + end - start] if opening and whole.startswith(opening, at) else whole[start:end]

    def earlier_reply(self, content: str = ANSWER) -> str | None:
        """An answer with another question after it: some templates write earlier turns differently."""
        whole = self.render([user_message(), {"role": "assistant", "content": content}, user_message()])
        return None if whole is None else whole.partition(QUESTION)[2]

    def leading_space(self, message: Mapping[str, Any], mark: str, frame: str = "", /, **variables: Any) -> str:
        """The white space between the generation prompt and a reply, or the frame of an empty answer."""
        text = self.between(message, mark, **variables)
        return text if text is not None and text.strip() in ("", frame) else ""

    def between(self, message: Mapping[str, Any], mark: str, /, **variables: Any) -> str | None:
        """The text between the generation prompt and a mark in the reply; None if the reply does not start with the
        generation prompt."""
        prompt = self.render([user_message()], True, **variables)
        whole = self.render([user_message(), {"role": "assistant", **message}], **variables)
        if prompt is None or whole is None or not whole.startswith(prompt) or mark not in whole[len(prompt) :]:
            return None
        return whole[len(prompt) : whole.index(mark, len(prompt))]

    def call_reply(self, count: int, as_text: bool, arguments: dict[str, Any] | None = None) -> str | None:
        """The rendered text of tool calls, with an empty content or none."""
        for content in ("", None):
            message = {"content": content, "tool_calls": sample_calls(count, as_text, arguments)}
            written = self.reply(message, tools=sample_tools())
            if written is not None:
                return written
        return None

    def variables(self) -> list[str]:
        """The undeclared names of the template, beside those that every template gets."""
        return sorted(meta.find_undeclared_variables(self.template.tree) - _STANDARD_VARIABLES)

    @cached_property
    def inputs(self) -> tuple[TemplateVariable, ...]:
        """The variables that a request can set, with their values and uses in the syntax tree."""
        try:
            return template_variables(self.template.tree, _STANDARD_VARIABLES)
        except OutOfFuel as error:
            raise HostileTemplate(self.template.name, None, str(error)) from None

    def variations(self) -> Iterator[dict[str, Any]]:
        """Every variable with true, false and each value that the template names."""
        for variable in self.inputs:
            named = (value for value in (*variable.values, *variable.defaults) if value is not None)
            for value in {repr(value): value for value in (True, False, *named)}.values():
                yield {variable.name: value}

    def texts(self) -> Iterator[str]:
        """Every constant text in the template's syntax tree."""
        for constant in self.template.tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                yield constant.value
        for data in self.template.tree.find_all(nodes.TemplateData):
            yield data.data


def user_message() -> dict[str, Any]:
    return {"role": "user", "content": QUESTION}


def thinking_message(field: str | None) -> dict[str, Any]:
    """An assistant's message with a thought in the field that the template reads."""
    typed = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
    message: dict[str, Any] = {"role": "assistant", "content": typed if field == "content" else ANSWER}
    return message if field in (None, "content") else {**message, str(field): THOUGHT}


Texts: TypeAlias = tuple[str | None, ...]
"""The rendered text of each scene; None for one that the template refuses."""


@dataclass(frozen=True, slots=True)
class ProbeScene:
    """A conversation with further template variables."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = field(default_factory=dict)
    prompt: bool = True


class ProbeStage:
    """Renders all scenes with one template, given its markers of thinking and its field for thinking."""

    def __init__(self, prober: Prober, thinking: ThinkingFacts | None, reasoning_field: str | None) -> None:
        self._prober = prober
        self._thinking = thinking
        self._field = reasoning_field

    @cached_property
    def scenes(self) -> dict[str, ProbeScene]:
        """Conversations in which a variable may have an effect, by name. Only those that the template accepts."""
        result = {"role": "tool", "content": RESULT, "tool_call_id": "probeid01", "name": NAME}
        picture = {"type": "image", "image": "picture"}
        typed = {"role": "user", "content": [{"type": "text", "text": QUESTION}, picture, picture]}
        paper = {"title": "Title", "text": "Text", "content": "Content", "doc_id": 1}
        tools = {"tools": sample_tools()}
        scenes = {
            "plain": ProbeScene([user_message()]),
            "system": ProbeScene([{"role": "system", "content": "SYSTEMq7"}, user_message()]),
            "last turn": ProbeScene([user_message(), thinking_message(None)], prompt=False),
            "earlier turns": ProbeScene([user_message(), thinking_message(None), user_message()]),
            "earlier thoughts": ProbeScene([user_message(), thinking_message(self._field), user_message()]),
            "tools": ProbeScene([user_message()], tools),
            "pictures": ProbeScene([typed]),
            "documents": ProbeScene([user_message()], {"documents": [paper]}),
        }
        for as_text in (False, True):
            call = {"role": "assistant", "content": "", "tool_calls": sample_calls(1, as_text)}
            scenes["calls, arguments as text" if as_text else "calls"] = ProbeScene(
                [user_message(), call, result], tools
            )
        plain = self._prober.render([user_message()], True)
        return {
            name: scene for name, scene in scenes.items() if name == "plain" or self._render(scene) not in (None, plain)
        }

    def _render(self, scene: ProbeScene, /, **variables: Any) -> str | None:
        return self._prober.render(scene.messages, scene.prompt, **{**scene.variables, **variables})

    def render_scenes(self, **variables: Any) -> Texts:
        """The variables override those of a scene."""
        return tuple(self._render(scene, **variables) for scene in self.scenes.values())

    def rendered_tools(self) -> str | None:
        """A prompt with tools in the standard `tools` variable."""
        return self._prober.render([user_message()], True, tools=sample_tools())

    def date_format(self) -> str:
        """The format that the template passes to `strftime_now`; empty if it does not call it."""
        calls = self._prober.template.tree.find_all(nodes.Call)
        arguments = (call.args for call in calls if getattr(call.node, "name", "") == "strftime_now")
        return next((str(args[0].value) for args in arguments if args and isinstance(args[0], nodes.Const)), "")

    def without_thoughts(self, text: str | None) -> str:
        """The text without a thought, its markers and white space."""
        bare = (text or "").replace(THOUGHT, "")
        for marker in (self._thinking.opener, self._thinking.closer) if self._thinking else ():
            bare = bare.replace(marker, "")
        return "".join(bare.split())

    def reply_opening(self, /, **variables: Any) -> str | None:
        """How the reply opens: in an open thought, after a closed one, or free. None if it is unknown."""
        whole = self._prober.render([user_message()], True, **variables)
        if self._thinking is None or whole is None or not self._prober.opening(**variables):
            return None
        tail = whole[whole.rfind(QUESTION) + len(QUESTION) :]
        if tail.rfind(self._thinking.opener) > tail.rfind(self._thinking.closer):
            return "open"
        return "closed" if tail.rstrip().endswith(self._thinking.closer) else "free"

    def keeps_thinking(self, **variables: Any) -> bool | None:
        """Whether the thinking of an earlier turn is in the prompt."""
        if self._field is None:
            return None
        whole = self._prober.render([user_message(), thinking_message(self._field), user_message()], True, **variables)
        return None if whole is None else THOUGHT in whole
