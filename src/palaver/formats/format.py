"""A learned format: the two verbs `render` and `reader` over one template and one tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from palaver.errors import BadParameter, EmptyMessage, NoMessages, TemplateError, UnsupportedContent
from palaver.formats.base import RenderOptions
from palaver.formats.escaping import ControlTextEscaper
from palaver.formats.facts import Confidence, Evidence, Facts, ThinkingFacts
from palaver.formats.facts_store import apply_overrides, cached_facts
from palaver.formats.history_tokens import match_history
from palaver.formats.learn.learner import learn
from palaver.formats.learn.probes import ANSWER, THOUGHT, Prober, tool_variables
from palaver.formats.markers import CONTROL_LIKE, match_any, split_marker
from palaver.formats.prefill import Healer, LeadingSpace, write_partial_reply
from palaver.formats.reader import ReaderOptions, ReplyReader
from palaver.formats.reply_states import ReplyStates, find_headers
from palaver.formats.switches import Switch, SwitchKind, SwitchResolver
from palaver.formats.template import Template
from palaver.formats.tokenizer import Run, Tokenizer
from palaver.formats.tool_calls import syntaxes
from palaver.formats.tool_calls.forced import forced_call_grammar
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools
from palaver.generation import Prompt
from palaver.messages import Message, Role, Text, Thinking, Tool, ToolCall, ToolResult
from palaver.phases import Phase, Phases


class TemplateFormat:
    """How one model talks."""

    def __init__(
        self, template: Template, tokenizer: Tokenizer, strings: Mapping[str, str], facts: Facts | None = None
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._strings = strings
        self.facts: Facts = facts or cached_facts(
            template.source, strings, tokenizer.control, lambda: learn(template, strings, tokenizer.control)
        )
        self._known_leads: dict[str, LeadingSpace] = {}
        self._anatomy = ReplyStates(self.facts, tokenizer.control, tokenizer.special_ids)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.facts.stop_strings

    @property
    def switches(self) -> tuple[Switch, ...]:
        return self.facts.switches

    @property
    def thinking_switch(self) -> Switch | None:
        return self.facts.switch

    @property
    def thinks(self) -> bool:
        return self.facts.thinking is not None

    @property
    def takes_tools(self) -> bool:
        return self.facts.calls is not None

    @cached_property
    def call_marker(self) -> int | str | None:
        if self.facts.calls is None:
            return None
        headers = find_headers(self.facts)
        if headers is not None:
            return headers.recipient or None
        control = self._tokenizer.control
        first = next(iter(split_marker(syntaxes.opening(self.facts.calls), control)), "")
        return control.get(first, first if CONTROL_LIKE.fullmatch(first) else None)

    def corrected(self, path: Path) -> TemplateFormat:
        """The same format with an operator's corrections."""
        return TemplateFormat(self._template, self._tokenizer, self._strings, apply_overrides(self.facts, path))

    def with_thinking(self, thinking: ThinkingFacts) -> TemplateFormat:
        """The same format for a model known to think, though its template does not show it."""
        told = Evidence("thinking is taken for granted", repr(thinking), Confidence.CONVENTION)
        facts = replace(self.facts, thinking=thinking, evidence=(*self.facts.evidence, told))
        return TemplateFormat(self._template, self._tokenizer, self._strings, facts)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
        reply_so_far: Sequence[int] = (),
        begun: Message | None = None,
        past: Sequence[Sequence[int] | None] = (),
    ) -> Prompt:
        """The prompt for the assistant's next turn. Depends on its arguments alone.

        A reply that has been begun is given by its token ids, or as a message where there is only text.
        """
        _check(messages)
        said = {"messages": [self._message(m) for m in messages], **tool_variables(self.facts, _schemas(tools))}
        guarded = self._fence.guard({**said, **options.variables})
        given = {**self._strings, **guarded.values, **self.switched(options), **self.dates(options)}
        text = self._template.render({**given, "add_generation_prompt": True}, options.now)
        opens_in = self._opens_in(text, given, options.now)
        ids = self._context_ids(text, guarded.mark, past)
        phases = self._phases(opens_in, tools, options)
        if reply_so_far or not (options.healing and begun):
            reply = tuple(reply_so_far) or self.begun_ids(begun, options, opens_in)
            return Prompt(tuple(ids), reply, phases)
        reply, healing = self._healer.heal(self.begun_ids(begun, options, opens_in))
        return Prompt(tuple(ids), reply, phases, healing=healing)

    def _phases(self, opens_in: Phase, tools: Sequence[Tool], options: RenderOptions) -> Phases:
        offers = bool(tools) and options.calls
        if not options.must_call:
            return self._anatomy.phases(opens_in, offers, self._closing_ids)
        called = [tool for tool in tools if tool.name in options.must_call]
        if not called or not options.calls:
            raise BadParameter("must_call", ", ".join(options.must_call), "there is no such tool among the tools")
        must = forced_call_grammar(
            self.facts, called, self._tokenizer.control, self._leads(options).calls, options.thinking is not False
        )
        return replace(self._anatomy.phases(opens_in, offers, self._closer_ids, must_call=True), held=must)

    def _context_ids(self, text: str, mark: str, past: Sequence[Sequence[int] | None]) -> list[int]:
        opening = self.facts.thinking.opening if self.facts.thinking else ""
        ids: list[int] = []
        for piece in match_history(text, self.facts.header, opening, past, self._tokenizer.vocabulary):
            ids += self._tokenizer.encode(self._runs(piece, mark)) if isinstance(piece, str) else piece
        return ids

    def reader(
        self,
        prompt: Prompt,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
    ) -> ReplyReader:
        reads = partial(syntaxes.reader, self.facts.calls) if self.facts.calls is not None else None
        opening = self.facts.thinking.opening if self.facts.thinking else ""
        trims = self.facts.thinking is not None
        reading = ReaderOptions(
            stops, tools, reads, options.unsplit, opening, trims, options.json_answer, options.one_call
        )
        return ReplyReader(prompt, self._tokenizer.vocabulary, reading)

    @cached_property
    def _fence(self) -> ControlTextEscaper:
        """What no content may spell as more than text: the tokenizer's own tokens and the format's markers."""
        thinking = self.facts.thinking
        markers = CONTROL_LIKE.findall(thinking.opener + thinking.closer) if thinking else ()
        return ControlTextEscaper([*self._tokenizer.control, *markers])

    @cached_property
    def _healer(self) -> Healer:
        return Healer(self._tokenizer.vocabulary, self._tokenizer.control.values())

    @cached_property
    def _closing_ids(self) -> tuple[int, ...]:
        thinking = self.facts.thinking
        return tuple(self._tokenizer.encode(self._runs(thinking.closing))) if thinking else ()

    @cached_property
    def _closer_ids(self) -> tuple[int, ...]:
        """What closes a thought, and no more: what comes behind it may be something else than an answer."""
        thinking = self.facts.thinking
        if thinking is None:
            return ()
        last = split_marker(thinking.closer)[-1]
        end = thinking.closing.index(last) + len(last)
        return tuple(self._tokenizer.encode(self._runs(thinking.closing[:end])))

    def begun_ids(self, message: Message | None, options: RenderOptions, opens_in: Phase) -> tuple[int, ...]:
        """The ids of a reply of which only the text is known; control text in it stays text."""
        prefix = tuple(self._tokenizer.encode(self._runs(options.response_prefix)))
        if message is None:
            return prefix
        guarded = self._fence.guard({"parts": [_parts(part) for part in message.parts]})
        pairs = zip(message.parts, guarded.values["parts"], strict=True)
        safe = Message(message.role, tuple(_with_parts(part, values) for part, values in pairs))
        text = write_partial_reply(self.facts, safe, opens_in, self._leads(options))
        return (*self._tokenizer.encode(self._runs(text, guarded.mark)), *prefix)

    def begins_behind_empty_thought(self, options: RenderOptions) -> bool:
        """Whether an answer without a thought is begun behind a closed, empty one."""
        return bool(self._leads(options).empty_thought)

    def _leads(self, options: RenderOptions) -> LeadingSpace:
        """What the template writes between its own generation prompt and a reply, by what the reply begins with."""
        chosen = {**options.variables, **self.switched(options)}
        key = repr(sorted(chosen.items()))
        if key not in self._known_leads:
            self._known_leads[key] = self._probed_leads(chosen)
        return self._known_leads[key]

    def _probed_leads(self, chosen: Mapping[str, Any]) -> LeadingSpace:
        prober = Prober(self._template, self._strings)
        given = {name: value for name, value in chosen.items() if name != "tools"}
        field = self.facts.reasoning_field
        thought = {field: THOUGHT} if field and field != "content" else {}
        called = {"content": "", "tool_calls": sample_calls(1, self.facts.arguments_as_text)}
        anchor = next(iter(split_marker(syntaxes.opening(self.facts.calls))), NAME) if self.facts.calls else NAME
        return LeadingSpace(
            prober.lead({"content": ANSWER, **thought}, THOUGHT, **given),
            prober.lead({"content": ANSWER}, ANSWER, **given),
            prober.lead(called, anchor, self.facts.empty_answer, tools=sample_tools(), **given),
            *self._empty_thought(prober, given),
        )

    def _empty_thought(self, prober: Prober, given: Mapping[str, Any]) -> tuple[str, bool]:
        """What stands between a generation prompt that leaves open whether the model thinks, and an answer without a
        thought: as the template writes it in a history (then before calls, too), or else as the generation prompt
        does with thinking off."""
        thinking = self.facts.thinking
        if thinking is None or self.facts.answer_opening.strip():
            return "", False
        written = prober.between({"content": ANSWER}, ANSWER, **given) or ""
        if written.rstrip().endswith(thinking.closer):
            return written, True
        return self._switched_off(prober, given, thinking), False

    def _switched_off(self, prober: Prober, given: Mapping[str, Any], thinking: ThinkingFacts) -> str:
        """The closed thought that the generation prompt ends with where thinking is off, if it is on now."""
        switch = self.facts.switch
        if switch is None or not switch.thinks(given):
            return ""
        off = {**given, switch.name: switch.off}
        left_open, closed = prober.opening(**given) or "", prober.opening(**off) or ""
        block = closed[len(left_open) :] if closed.startswith(left_open) else ""
        if not block.rstrip().endswith(thinking.closer):
            return ""
        if "".join(block.split()) != "".join((thinking.opener + thinking.closer).split()):  # it gives a reason
            return thinking.opening + thinking.closing
        return block + prober.lead({"content": ANSWER}, ANSWER, **off)

    def switched(self, options: RenderOptions) -> dict[str, Any]:
        """What the options come to in the template's own variables."""
        return self._wishes.variables(options)

    @cached_property
    def _wishes(self) -> SwitchResolver:
        return SwitchResolver(self.facts.switches, self.facts.asks_for)

    def dates(self, options: RenderOptions) -> dict[str, Any]:
        """Some templates ask for the day by a variable instead of a function."""
        day = options.now or datetime(2024, 1, 1)
        asked = (switch for switch in self.facts.switches if switch.kind is SwitchKind.DATE and switch.form)
        return {switch.name: day.strftime(switch.form) for switch in asked if switch.name not in options.variables}

    def _closed(self, given: Mapping[str, Any], now: datetime | None) -> str:
        try:
            return self._template.render({**given, "add_generation_prompt": False}, now)
        except TemplateError:  # some refuse a conversation that doesn't end in a reply
            return ""

    def _opens_in(self, text: str, given: Mapping[str, Any], now: datetime | None) -> Phase:
        """Only what the template itself wrote as the reply's opening is looked at: the end of the text."""
        thinking = self.facts.thinking
        if thinking is None or text.rfind(thinking.opener) <= text.rfind(thinking.closer):
            return Phase.ANSWER  # no end of the text has an opener that is not closed
        closed = self._closed(given, now)
        opening = text[len(closed) :] if closed and text.startswith(closed) else ""
        if not opening:  # a template that always writes the opening
            opening = text[text.rfind(self.facts.header) :] if self.facts.header else ""
        return Phase.THINKING if opening.rfind(thinking.opener) > opening.rfind(thinking.closer) else Phase.ANSWER

    def _runs(self, text: str, mark: str = "") -> Iterator[Run]:
        """The text parted into control tokens and the runs between them, without the marks."""
        control = self._tokenizer.control
        at = 0
        for match in self._control_pattern.finditer(text) if control else ():
            if plain := text[at : match.start()].replace(mark, ""):
                yield plain
            yield control[match[0]]
            at = match.end()
        if plain := text[at:].replace(mark, ""):
            yield plain

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return match_any(self._tokenizer.control)

    def _message(self, message: Message) -> dict[str, Any]:
        out: dict[str, Any] = {"role": str(message.role), "content": _content(message)}
        if message.thinking and self.facts.reasoning_field == "content":
            text = [{"type": "text", "text": message.text}] if message.text else []
            out["content"] = [{"type": "thinking", "thinking": message.thinking}, *text]
        elif message.thinking and self.facts.reasoning_field:
            out[self.facts.reasoning_field] = message.thinking
        if message.tool_calls:
            out["tool_calls"] = [_call(call, self.facts.arguments_as_text) for call in message.tool_calls]
        for result in message.tool_results:
            out |= {"tool_call_id": result.call_id} | ({"name": result.name} if result.name else {})
        return out


def _check(messages: Sequence[Message]) -> None:
    if not any(message.role is Role.USER for message in messages):
        raise NoMessages
    last = messages[-1]
    if last.role is Role.USER and not last.text.strip() and all(isinstance(part, Text) for part in last.parts):
        raise EmptyMessage


def _content(message: Message) -> str:
    texts = []
    for part in message.parts:
        match part:
            case Text(text):
                texts.append(text)
            case ToolResult(_, content):
                texts.append(content)
            case Thinking() | ToolCall():
                pass
            case _:
                raise UnsupportedContent(f"This model takes text only, not {type(part).__name__.lower()}.")
    return "".join(texts)


def _call(call: ToolCall, as_text: bool) -> dict[str, Any]:
    """Arguments as the template wants them; what can't be parsed stays text."""
    arguments: Any = call.arguments or "{}"
    if not as_text:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
        }
        for t in tools
    ]


def _parts(part: Any) -> dict[str, str]:
    return {"name": part.name, "text": part.arguments} if isinstance(part, ToolCall) else {"text": part.text}


def _with_parts(part: Any, values: Mapping[str, str]) -> Any:
    if isinstance(part, ToolCall):
        return replace(part, name=values["name"], arguments=values["text"])
    return replace(part, text=values["text"])
