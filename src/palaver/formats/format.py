"""Formats: that of a chat template, which renders prompts and builds reply readers from the facts learned about it, and
that of a base model without a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from palaver.errors import BadParameter, EmptyMessage, NoMessages, TemplateError, UnsupportedContent
from palaver.formats.base import RenderOptions
from palaver.formats.escaping import ControlTextEscaper
from palaver.formats.facts import (
    Confidence,
    Evidence,
    Facts,
    Switch,
    SwitchKind,
    SwitchResolver,
    ThinkingFacts,
    apply_overrides,
    cached_facts,
)
from palaver.formats.history_tokens import PromptPiece, match_history
from palaver.formats.learn.learner import learn
from palaver.formats.learn.probes import ANSWER, THOUGHT, Prober, user_message
from palaver.formats.markers import CONTROL_LIKE, match_any, split_marker
from palaver.formats.media import ExpandMedia, Placeholder, PromptMedia, find_placeholders, find_result_media
from palaver.formats.prefill import Healer, LeadingSpace, write_partial_reply
from palaver.formats.reader import ReaderOptions, ReplyReader
from palaver.formats.reply_states import ReplyStates, find_headers
from palaver.formats.template import Template
from palaver.formats.tokenizer import Run, Tokenizer
from palaver.formats.tool_calls import syntaxes
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools
from palaver.formats.tool_choice import forced_call_grammar
from palaver.generation import MediaSpan, Prompt
from palaver.messages import MediaPart, Message, Role, Text, Thinking, Tool, ToolCall, ToolResult, assistant, tool, user
from palaver.phases import Phase, Phases, State


class TemplateFormat:
    """One chat template with one tokenizer."""

    def __init__(
        self, template: Template, tokenizer: Tokenizer, strings: Mapping[str, str], facts: Facts | None = None
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._strings = strings
        self.facts: Facts = facts or cached_facts(
            template.source, strings, tokenizer.control, lambda: learn(template, strings, tokenizer.control)
        )
        self._leading_space_cache: dict[str, LeadingSpace] = {}
        self._reply_phases = cache(ReplyStates(self.facts, tokenizer.control, tokenizer.special_ids).phases)

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
        if self.facts.calls is None or self.facts.sections is not None:
            return None
        headers = find_headers(self.facts)
        if headers is not None:
            return headers.recipient or None
        control = self._tokenizer.control
        first = next(iter(split_marker(syntaxes.opening(self.facts.calls), control)), "")
        return control.get(first, first if CONTROL_LIKE.fullmatch(first) else None)

    def with_overrides(self, path: Path) -> TemplateFormat:
        """The same format with the facts of a `palaver-format.toml` on top."""
        return TemplateFormat(self._template, self._tokenizer, self._strings, apply_overrides(self.facts, path))

    def with_thinking(self, thinking: ThinkingFacts) -> TemplateFormat:
        """The same format for a model that is known to think, though its template does not show it."""
        evidence = Evidence("thinking is taken for granted", repr(thinking), Confidence.CONVENTION)
        facts = replace(self.facts, thinking=thinking, evidence=(*self.facts.evidence, evidence))
        return TemplateFormat(self._template, self._tokenizer, self._strings, facts)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
        reply_so_far: Sequence[int] = (),
        partial_reply: Message | None = None,
        past_replies: Sequence[Sequence[int] | None] = (),
        expand: ExpandMedia | None = None,
    ) -> Prompt:
        """The prompt for the assistant's next turn. Depends on its arguments only.

        A partial reply is given by its token ids (`reply_so_far`), or as a message if only its text is known.
        """
        if not messages:
            raise NoMessages
        media = self._prompt_media(messages, expand)
        inputs = {
            "messages": [self.template_message(m, media) for m in messages],
            **self.facts.tool_variables(_schemas(tools)),
        }
        escaper = self._escaper if media is None else self._media_escaper
        escaped = escaper.escape({**inputs, **options.variables})
        switches = {**self.switch_variables(options), **self.date_variables(options)}
        variables = {**self._strings, **escaped.values, **switches}
        text = self._template.render({**variables, "add_generation_prompt": True}, options.now)
        if all(message.role is Role.SYSTEM for message in messages):
            _check_system(messages, text.replace(escaped.mark, ""))
        opens_in = self._opens_in(text, variables, options.now)
        lacks_first_line = opens_in is Phase.THINKING and self._lacks_first_line(partial_reply)
        if lacks_first_line and self.facts.thinking is not None:
            text = text.removesuffix(self.facts.thinking.opening)
        ids, spans = self._context_ids(text, escaped.mark, past_replies, media)
        if not ids:
            raise EmptyMessage
        phases = self._phases(opens_in, tools, options, self._may_think({**options.variables, **switches}))
        if lacks_first_line:
            phases = replace(phases, start=phases.states[phases.start].other or phases.start)
        if reply_so_far or not (options.healing and partial_reply):
            reply = tuple(reply_so_far) or self.partial_reply_ids(partial_reply, options, opens_in)
            return Prompt(tuple(ids), reply, phases, media=tuple(spans))
        reply, healing = self._healer.heal(self.partial_reply_ids(partial_reply, options, opens_in))
        return Prompt(tuple(ids), reply, phases, healing=healing, healing_at=len(reply), media=tuple(spans))

    @cached_property
    def placeholders(self) -> Mapping[str, Placeholder]:
        """What the template writes for media, by kind."""
        return find_placeholders(self._template, self._strings, self._tokenizer.control)

    @cached_property
    def result_media(self) -> frozenset[str]:
        """The kinds of media that the template writes in tool results, too."""
        if not self.takes_tools:
            return frozenset()
        call = ToolCall("call_1", "look", "{}")
        before = [self.template_message(one) for one in (user("Look."), assistant(calls=(call,)))]
        result = self.template_message(tool("call_1", "", "look"))
        return find_result_media(self._template, self._strings, self.placeholders, before, result)

    def _prompt_media(self, messages: Sequence[Message], expand: ExpandMedia | None) -> PromptMedia | None:
        parts = [part for message in messages for part in message.parts if isinstance(part, MediaPart)]
        if not parts:
            return None
        if expand is None:
            raise UnsupportedContent(f"This model takes text only, not {type(parts[0]).__name__.lower()}.")
        return PromptMedia(messages, expand, self.placeholders, self._tokenizer)

    def _lacks_first_line(self, partial_reply: Message | None) -> bool:
        """Whether the thought of a partial reply lacks the first line that the generation prompt would write."""
        thinking = self.facts.thinking
        if thinking is None or not thinking.first_line or partial_reply is None or not partial_reply.thinking:
            return False
        return not partial_reply.thinking.startswith(thinking.opener)

    def _may_think(self, variables: Mapping[str, Any]) -> bool:
        """Whether thinking isn't switched off, by these variables or by default."""
        switch = self.facts.switch
        if switch is None or (switch.default is None and switch.name not in variables):
            return True
        return switch.thinks(variables)

    def _phases(self, opens_in: Phase, tools: Sequence[Tool], options: RenderOptions, may_think: bool) -> Phases:
        offers_tools = bool(tools) and options.calls
        if not options.must_call:
            phases = self._reply_phases(opens_in, offers_tools, self._closing_ids)
            return phases if may_think else replace(phases, may_think=False)
        forced = [tool for tool in tools if tool.name in options.must_call]
        if not forced or not options.calls:
            raise BadParameter("must_call", ", ".join(options.must_call), "there is no such tool among the tools")
        lead = self._leading_space(options).calls
        grammar = forced_call_grammar(self.facts, forced, self._tokenizer.control, lead, may_think)
        phases = self._reply_phases(opens_in, offers_tools, self._closer_ids, must_call=True)
        return replace(phases, held=grammar, may_think=may_think)

    def _context_ids(
        self, text: str, mark: str, past_replies: Sequence[Sequence[int] | None], media: PromptMedia | None
    ) -> tuple[list[int], list[MediaSpan]]:
        text = text if media is None else media.mark(text)
        pieces: Iterable[PromptPiece] = (text,)
        if any(past_replies):
            opening = self.facts.thinking.opening if self.facts.thinking else ""
            pieces = match_history(text, self.facts.header, opening, past_replies, self._tokenizer.vocabulary)
        ids: list[int] = []
        spans: list[MediaSpan] = []
        for piece in pieces:
            if not isinstance(piece, str):
                ids += piece
            elif media is None:
                ids += self._tokenizer.encode(self._runs(piece, mark))
            else:
                more, found = media.encode(self._runs(piece, mark), len(ids))
                ids += more
                spans += found
        return ids, spans

    def reader(
        self,
        prompt: Prompt,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
    ) -> ReplyReader:
        call_reader = partial(syntaxes.reader, self.facts.calls) if self.facts.calls is not None else None
        opening = self.facts.thinking.opening if self.facts.thinking else ""
        reader_options = ReaderOptions(
            stops,
            tools,
            call_reader,
            unsplit=options.unsplit,
            opening=opening,
            closer=self.facts.thinking.closer if self.facts.thinking else "",
            answer_closers=self._answer_closers,
            trim_start=self.facts.thinking is not None or bool(self._answer_closers),
            strip_fence=options.json_answer,
            one_call=options.one_call,
        )
        return ReplyReader(prompt, self._tokenizer.vocabulary, reader_options)

    @cached_property
    def _escaper(self) -> ControlTextEscaper:
        """Escapes the tokenizer's control tokens and the markers of thinking in contents."""
        return ControlTextEscaper([*self._tokenizer.control, *self._thinking_markers])

    @property
    def _thinking_markers(self) -> list[str]:
        thinking = self.facts.thinking
        return CONTROL_LIKE.findall(thinking.opener + thinking.closer) if thinking else []

    @cached_property
    def _media_escaper(self) -> ControlTextEscaper:
        """Escapes the placeholders of media too: that of a template need not be a control token."""
        placeholders = [placeholder.text for placeholder in self.placeholders.values()]
        return ControlTextEscaper([*self._tokenizer.control, *self._thinking_markers, *placeholders])

    @cached_property
    def _answer_closers(self) -> tuple[bytes, ...]:
        """The markers that close an answer."""
        closing = self.facts.answer_closing + self.facts.called_text_closing
        parts = split_marker(closing, self._tokenizer.control)
        return tuple(part.encode() for part in parts if CONTROL_LIKE.fullmatch(part))

    @cached_property
    def _healer(self) -> Healer:
        return Healer(self._tokenizer.vocabulary, self._tokenizer.control.values())

    @cached_property
    def _closing_ids(self) -> tuple[int, ...]:
        thinking = self.facts.thinking
        return tuple(self._tokenizer.encode(self._runs(thinking.closing))) if thinking else ()

    @cached_property
    def _closer_ids(self) -> tuple[int, ...]:
        """The ids up to the marker that closes a thought; something else than an answer may follow."""
        thinking = self.facts.thinking
        if thinking is None:
            return ()
        return tuple(self._tokenizer.encode(self._runs(thinking.closing_before_calls)))

    def partial_reply_ids(self, message: Message | None, options: RenderOptions, opens_in: Phase) -> tuple[int, ...]:
        """The ids of a partial reply of which only the text is known. Control text in it stays text."""
        prefix = tuple(self._tokenizer.encode(self._runs(options.response_prefix)))
        if message is None:
            return prefix
        escaped = self._escaper.escape({"parts": [_part_texts(part) for part in message.parts]})
        pairs = zip(message.parts, escaped.values["parts"], strict=True)
        safe = Message(message.role, tuple(_with_texts(part, values) for part, values in pairs))
        text = write_partial_reply(self.facts, safe, opens_in, self._leading_space(options))
        return (*self._tokenizer.encode(self._runs(text, escaped.mark)), *prefix)

    def prefills_empty_thought(self, options: RenderOptions) -> bool:
        """Whether a partial answer without a thought is written after a closed, empty thought."""
        return bool(self._leading_space(options).empty_thought)

    def _leading_space(self, options: RenderOptions) -> LeadingSpace:
        """The text between the generation prompt and a reply, as the template writes it."""
        variables = {**options.variables, **self.switch_variables(options)}
        key = repr(sorted(variables.items()))
        if key not in self._leading_space_cache:
            self._leading_space_cache[key] = self._probe_leading_space(variables)
        return self._leading_space_cache[key]

    def _probe_leading_space(self, variables: Mapping[str, Any]) -> LeadingSpace:
        prober = Prober(self._template, self._strings)
        given = {name: value for name, value in variables.items() if name != "tools"}
        field = self.facts.reasoning_field
        thought = {field: THOUGHT} if field and field != "content" else {}
        call = {"content": "", "tool_calls": sample_calls(1, self.facts.arguments_as_text)}
        opening = syntaxes.opening(self.facts.calls).strip() if self.facts.calls else ""
        start = syntaxes.start(self.facts.calls) if self.facts.calls else NAME
        anchor = opening if self.facts.sections and opening else start
        before_calls = prober.between(call, anchor, tools=sample_tools(), **given) or ""
        closer = self.facts.thinking.closer if self.facts.thinking else ""
        closes = bool(closer) and before_calls.strip() in (closer, closer + self.facts.empty_answer)
        frames = ("", self.facts.empty_answer, self.facts.answer_closing.strip(), self.facts.empty_called_text)
        prompt = prober.render([user_message()], True, **given) or ""
        return LeadingSpace(
            prober.leading_space({"content": ANSWER, **thought}, THOUGHT, **given),
            prober.leading_space({"content": ANSWER}, ANSWER, **given),
            before_calls if "".join(before_calls.split()) in frames else "",
            *self._empty_thought(prober, given),
            calls_after_opening=before_calls if closes else "",
            answer_opened=bool(self.facts.answer_opening.strip()) and prompt.endswith(self.facts.answer_opening),
        )

    def _empty_thought(self, prober: Prober, given: Mapping[str, Any]) -> tuple[str, bool]:
        """The empty thought before an answer without thinking, where the generation prompt lets the model think.

        As the template writes it in a history (then it also stands before calls), or else as the generation prompt
        writes it with thinking off."""
        thinking = self.facts.thinking
        if thinking is None or self.facts.answer_opening.strip():
            return "", False
        written = prober.between({"content": ANSWER}, ANSWER, **given) or ""
        if written.rstrip().endswith(thinking.closer):
            return written, True
        return self._closed_thought(prober, given, thinking), False

    def _closed_thought(self, prober: Prober, given: Mapping[str, Any], thinking: ThinkingFacts) -> str:
        """The closed thought at the end of the generation prompt with thinking off; empty if it is off already."""
        switch = self.facts.switch
        if switch is None or not switch.thinks(given):
            return ""
        off = {**given, switch.name: switch.off}
        open_prompt, closed_prompt = prober.opening(**given) or "", prober.opening(**off) or ""
        block = closed_prompt[len(open_prompt) :] if closed_prompt.startswith(open_prompt) else ""
        if not block.rstrip().endswith(thinking.closer):
            return ""
        words = ["".join(text.split()) for text in (block, thinking.opener + thinking.closer, thinking.closer)]
        if words[0] not in words[1:]:  # it gives a reason
            return thinking.opening + thinking.closing
        return block + prober.leading_space({"content": ANSWER}, ANSWER, **off)

    def switch_variables(self, options: RenderOptions) -> dict[str, Any]:
        """The template variables that express the options."""
        return self._switch_resolver.variables(options)

    @cached_property
    def _switch_resolver(self) -> SwitchResolver:
        return SwitchResolver(self.facts.switches, self.facts.asks_for)

    def date_variables(self, options: RenderOptions) -> dict[str, Any]:
        """Template variables that hold the date, for templates that do not call `strftime_now`."""
        day = options.now or datetime(2024, 1, 1)
        dates = (switch for switch in self.facts.switches if switch.kind is SwitchKind.DATE and switch.form)
        return {switch.name: day.strftime(switch.form) for switch in dates if switch.name not in options.variables}

    def _without_generation_prompt(self, variables: Mapping[str, Any], now: datetime | None) -> str:
        try:
            return self._template.render({**variables, "add_generation_prompt": False}, now)
        except TemplateError:  # some templates refuse a conversation that does not end in a reply
            return ""

    def _opens_in(self, text: str, variables: Mapping[str, Any], now: datetime | None) -> Phase:
        """The phase the reply opens in, by the generation prompt at the end of the text."""
        thinking = self.facts.thinking
        if thinking is None or text.rfind(thinking.opener) <= text.rfind(thinking.closer):
            return Phase.ANSWER  # no thought is open
        before = self._without_generation_prompt(variables, now)
        opening = text[len(before) :] if before and text.startswith(before) else ""
        if not opening:  # the template always writes the generation prompt
            opening = text[text.rfind(self.facts.header) :] if self.facts.header else ""
        if thinking.opener in opening or thinking.closer in opening:
            return Phase.THINKING if opening.rfind(thinking.opener) > opening.rfind(thinking.closer) else Phase.ANSWER
        return Phase.THINKING if self._thought_goes_on(before, variables, now) else Phase.ANSWER

    def _thought_goes_on(self, before: str, variables: Mapping[str, Any], now: datetime | None) -> bool:
        """Whether the reply goes on with the thought in which the last one called tools: the template would write its
        thought without an opening marker, but close it."""
        thinking, field = self.facts.thinking, self.facts.reasoning_field
        messages = variables["messages"]
        if thinking is None or field in (None, "content") or not self.facts.calls_in_thought or not before:
            return False
        if messages[-1]["role"] != Role.TOOL:
            return False
        reply = {"role": str(Role.ASSISTANT), "content": ANSWER, field: THOUGHT}
        written = self._without_generation_prompt({**variables, "messages": [*messages, reply]}, now)
        opening, thought, rest = written[len(before) :].partition(THOUGHT)
        is_open = bool(thought) and written.startswith(before) and thinking.opener not in opening
        return is_open and thinking.closer in rest.partition(ANSWER)[0]

    def _runs(self, text: str, mark: str = "") -> Iterator[Run]:
        """Splits the text into control tokens and plain text; escape marks are removed."""
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

    def template_message(self, message: Message, media: PromptMedia | None = None) -> dict[str, Any]:
        """The message as the template takes it."""
        content = _content(message) if media is None else media.content(message)
        out: dict[str, Any] = {"role": str(message.role), "content": content}
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


def _check_system(messages: Sequence[Message], prompt: str) -> None:
    """Raises NoMessages if the template drops a system prompt that stands alone, as those do that write it into the
    user's first message."""
    if any(message.text.strip() not in prompt for message in messages):
        raise NoMessages("The model's chat template writes no system prompt without a message from the user")


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
    """A call with its arguments as the template takes them. Arguments that are no JSON stay text."""
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


def _part_texts(part: Any) -> dict[str, str]:
    return {"name": part.name, "text": part.arguments} if isinstance(part, ToolCall) else {"text": part.text}


def _with_texts(part: Any, values: Mapping[str, str]) -> Any:
    if isinstance(part, ToolCall):
        return replace(part, name=values["name"], arguments=values["text"])
    return replace(part, text=values["text"])


class CompletionFormat:
    stop_strings: tuple[str, ...] = ()
    thinks = False
    takes_tools = False
    call_marker: int | str | None = None
    switches: tuple[Switch, ...] = ()
    thinking_switch: Switch | None = None
    placeholders: Mapping[str, Placeholder] = MappingProxyType({})
    result_media: frozenset[str] = frozenset()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
        reply_so_far: Sequence[int] = (),
        partial_reply: Message | None = None,
        past_replies: Sequence[Sequence[int] | None] = (),
        expand: ExpandMedia | None = None,
    ) -> Prompt:
        thinking_options = (options.thinking, options.effort, options.budget)
        if any(option is not None for option in thinking_options) or options.variables or tools:
            raise BadParameter("raw", "on", "text is completed as it is: no thinking switch, no variables, no tools")
        if not messages:
            raise NoMessages
        if len(messages) > 1 or messages[0].role is not Role.USER:
            raise BadParameter("raw", "on", "text is completed as it is: no system prompt, no earlier turns")
        text = _content(messages[0])
        if not text:
            raise EmptyMessage
        ids = self.tokenizer.encode((*self.tokenizer.prefix, text))
        phases = Phases((State(Phase.ANSWER),), hidden=self.tokenizer.special_ids)
        reply = tuple(reply_so_far) or tuple(self.tokenizer.encode([partial_reply.text] if partial_reply else []))
        return Prompt(tuple(ids), reply, phases)

    def reader(
        self,
        prompt: Prompt,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        options: RenderOptions = RenderOptions(),  # noqa: B008 - frozen
    ) -> ReplyReader:
        return ReplyReader(prompt, self.tokenizer.vocabulary, ReaderOptions(stops))
