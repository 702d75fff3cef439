"""Learns the facts of a format from its chat template: renders probes and compares the results.

No model and no template is known by name. A fact needs a probe that shows it. A template with sections that are named
by text between control tokens, `<|open|>think<|sep|> ... <|close|>think<|sep|>`, is read as if the sections were tags,
`<think> ... </think>`, and the learned facts are written back with the control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jinja2 import nodes

from palaver.formats.facts import (
    Confidence,
    Evidence,
    Facts,
    SectionTags,
    ThinkingFacts,
    facts_from_json,
    facts_to_json,
)
from palaver.formats.learn.probes import ANSWER, THOUGHT, Prober, thinking_message, user_message
from palaver.formats.learn.switches import SwitchLearner
from palaver.formats.learn.thinking import ThinkingLearner
from palaver.formats.markers import CONTROL_LIKE, are_paired, are_sides, common_start, looks_special, split_marker
from palaver.formats.template import Template
from palaver.formats.tool_calls import syntaxes
from palaver.formats.tool_calls.samples import (
    ARGUMENTS,
    LISTED_ARGUMENTS,
    NAME,
    NUMBER_VALUE,
    TEXT_KEY,
    CallSamples,
    sample_calls,
    sample_tools,
)
from palaver.formats.tool_calls.syntaxes import CONVENTION as CONVENTION_OF_CALLS
from palaver.formats.tool_calls.syntaxes import learn_from_instructions

CONVENTION = ThinkingFacts("<think>\n", "\n</think>\n\n", by_convention=True)
"""The markers of thinking that most models use."""


def learn(template: Template, strings: Mapping[str, str], control: Mapping[str, int]) -> Facts:
    """`strings` are the tokenizer's named tokens (bos_token, ...), `control` its tokens by their text."""
    prober = Prober(template, strings)
    sections = find_sections(prober)
    if sections is None:
        return Learner(prober, strings, control).learn()
    prober.rewrite_with(as_tags(sections))
    evidence = Evidence("sections are named by text", f"{sections.open}NAME{sections.end}", about="sections")
    facts = restore_facts(Learner(prober, strings, control).learn(), sections)
    return replace(facts, evidence=(evidence, *facts.evidence))


class Learner:
    """Learns the facts of one template, with the evidence for each."""

    def __init__(self, prober: Prober, strings: Mapping[str, str], control: Mapping[str, int]) -> None:
        self._prober = prober
        self._strings = strings
        self._control = control
        self._evidence: list[Evidence] = []
        self._answer_frame = "", ""
        self._thinking_variables: dict[str, Any] = {}
        self._call_header = ""
        self._called_text = "", ""
        self._header_text = ""

    def learn(self) -> Facts:
        thinking_learner = ThinkingLearner(self._prober, self._note)
        field, thinking = thinking_learner.learn()
        self._thinking_variables = thinking_learner.variables
        header = self._header_text = self._header(thinking)
        ends = self._turn_ends(header)
        self._answer_frame = self._learn_answer_frame(header, thinking, ends)
        as_text, samples = self._samples(header, thinking, ends)
        call_syntax, call_ends = self._call_syntax(samples, ends)
        ends = (*ends, *call_ends)
        opening, closing = self._answer_frame = self._learn_answer_frame(header, thinking, ends)
        self._note_answer()
        return Facts(
            header=header,
            reasoning_field=field,
            thinking=thinking,
            switches=SwitchLearner(self._prober, self._note, thinking, field).learn(),
            keeps_thinking=self._keeps_thinking(field),
            answer_opening=opening,
            answer_closing=closing,
            turn_ends=ends,
            calls=call_syntax,
            call_header=self._call_header,
            called_text_opening=self._called_text[0],
            called_text_closing=self._called_text[1],
            stop_strings=self._declared_strings("stop_strings", "stop"),
            space_before_calls=self._space_before_calls(call_syntax, as_text),
            space_after_thought=self._space_after_thought(call_syntax, field, thinking, as_text),
            calls_in_thought=self._calls_in_thought(call_syntax, field, thinking, as_text),
            no_tools=self._no_tools(),
            asks_for=self._asks_for(),
            arguments_as_text=as_text,
            evidence=tuple(self._evidence),
        )

    def _note(self, about: str, fact: str, seen: str, confidence: Confidence = Confidence.SEEN) -> None:
        self._evidence.append(Evidence(fact, seen, confidence, about))

    # -- turns ---------------------------------------------------------------------------------------------------

    def _header(self, thinking: ThinkingFacts | None) -> str:
        header = self._prober.opening() or ""
        if thinking:
            for marker in (thinking.opener, thinking.closer):
                at = header.find(marker) if marker else -1
                if at >= 0:
                    header = header[:at]
        for message in ({"content": ANSWER}, {"content": ANSWER, "reasoning_content": THOUGHT}):
            written = self._prober.reply(message)
            if written and not written.startswith(header) and common_start(header, written).strip():
                header = common_start(header, written)
        if header:
            self._note("header", "the text that opens the assistant's turn", header)
        return header

    def _turn_ends(self, header: str) -> tuple[str, ...]:
        """The marker after an answer ends the turn, and so does the tokenizer's end-of-sequence token."""
        ends = [self._strings["eos_token"]] if self._strings.get("eos_token") else []
        if ends:
            self._note("turn_ends", "the end-of-sequence token of the tokenizer", ends[0], Confidence.CONVENTION)
        turn = header.strip() or "\0"
        for written in (self._prober.reply({"content": ANSWER}), self._prober.earlier_reply()):
            if written and ANSWER in written:
                after = written.split(ANSWER, 1)[1]
                if after.strip():
                    self._note("turn_ends", "the text after an answer", after[:200])
                before = written.split(ANSWER, 1)[0]
                before = before.rpartition(turn)[2] if turn in before else _without_prefix(before, header)
                found = [part for part in split_marker(after, self._control) if self._is_control(part)]
                while found and any(are_paired(tag, found[0]) for tag in CONTROL_LIKE.findall(before)):
                    found = found[1:]
                ends += found[:1]
        return tuple(dict.fromkeys(ends))

    def _is_control(self, part: str) -> bool:
        return (
            part in self._control
            or bool(CONTROL_LIKE.fullmatch(part))
            or bool(re.fullmatch(r"[\[\]~\w]*~[\[\]~\w]*", part))
        )

    def _learn_answer_frame(
        self, header: str, thinking: ThinkingFacts | None, ends: tuple[str, ...]
    ) -> tuple[str, str]:
        """The text directly before and after an answer without a thought."""
        opening, after = self._around_answer(self._prober.reply({"content": ANSWER}), header, thinking)
        cut = min((at for end in ends if (at := after.find(end)) >= 0), default=len(after))
        return opening, (after[:cut] if after[:cut].strip() else "")

    def _around_answer(self, written: str | None, header: str, thinking: ThinkingFacts | None) -> tuple[str, str]:
        """The text before an answer, without header and thought, and all text after it."""
        if not written or ANSWER not in written:
            return "", ""
        before, after = written.split(ANSWER, 1)
        opening = _without_prefix(before, header)
        if thinking:
            for marker in (thinking.opener, thinking.closer):
                opening = opening.split(marker)[-1] if marker and marker in opening else opening
        return (opening if opening.strip() else ""), after

    def _learn_called_text(self, header: str, thinking: ThinkingFacts | None, as_text: bool) -> tuple[str, str]:
        """The text before an answer that calls follow and the marker after it, if an answer alone is written without
        them."""
        message = {"content": ANSWER, "tool_calls": sample_calls(1, as_text)}
        written = self._prober.reply(message, tools=sample_tools())
        opening, after = self._around_answer(written, header, thinking)
        opened, closed = CONTROL_LIKE.findall(opening), CONTROL_LIKE.search(after.partition(NAME)[0])
        if opening == self._answer_frame[0] or not opened or closed is None or not are_sides(opened[-1], closed[0]):
            return "", ""
        for about in ("called_text_opening", "called_text_closing"):
            self._note(about, "the text around an answer with calls after it", written or "")
        return opening, closed[0]

    def _note_answer(self) -> None:
        for about, text in zip(("answer_opening", "answer_closing"), self._answer_frame, strict=True):
            if text:
                written = self._prober.reply({"content": ANSWER})
                self._note(about, "the text around an answer", written or "")

    def _declared_strings(self, *names: str) -> tuple[str, ...]:
        """The strings that the template assigns to one of these names at its top level."""
        for node in self._prober.template.tree.body:
            if isinstance(node, nodes.Assign) and getattr(node.target, "name", "") in names:
                try:
                    value = node.node.as_const() if isinstance(node.node, nodes.Expr) else None
                except nodes.Impossible:
                    continue
                found = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
                self._note("stop_strings", "the template declares stop strings", repr(found))
                return tuple(text for text in found if isinstance(text, str) and text)
        return ()

    # -- template variables ----------------------------------------------------------------------------------------

    def _keeps_thinking(self, field: str | None) -> bool:
        """Whether the thinking of an earlier turn stays in the prompt."""
        if field is None:
            return False
        text = self._prober.render([user_message(), thinking_message(field), user_message()], True)
        kept = text is not None and THOUGHT in text
        self._note("keeps_thinking", f"thinking of earlier turns is {'kept' if kept else 'dropped'}", text or "refused")
        return kept

    def _no_tools(self) -> str:
        how = self._prober.no_tools
        meanings = {"null": "none", "empty": "an empty list", "absent": "an undefined variable"}
        self._note(
            "no_tools",
            f"no tools are passed as {meanings[how]}",
            self._prober.render([user_message()], True) or "refused",
        )
        return how

    def _asks_for(self) -> tuple[str, ...]:
        names = tuple(self._prober.variables())
        if names:
            self._note("asks_for", "variables that the template reads and does not set", ", ".join(names))
        return names

    # -- tool calls ----------------------------------------------------------------------------------------------

    def _call_syntax(
        self, samples: CallSamples | None, ends: tuple[str, ...]
    ) -> tuple[syntaxes.CallSyntax | None, tuple[str, ...]]:
        """The syntax of calls, and the markers that end only turns with calls."""
        syntax = (syntaxes.learn(samples) if samples else None) or self._calls_from_instructions()
        if samples is None or syntax is None:
            return syntax, ()
        self._note("calls", f"tool calls are {syntax.family}", samples.one)
        return syntax, self._call_ends(samples, syntax, ends)

    def _samples(
        self, header: str, thinking: ThinkingFacts | None, ends: tuple[str, ...]
    ) -> tuple[bool, CallSamples | None]:
        for as_text in (False, True):
            one = self._prober.call_reply(1, as_text)
            if one is None or TEXT_KEY not in one:
                continue
            two = self._prober.call_reply(2, as_text)
            none = self._prober.call_reply(1, as_text, {})
            listed = self._prober.call_reply(1, as_text, LISTED_ARGUMENTS)
            self._called_text = self._learn_called_text(header, thinking, as_text)
            if as_text:
                self._note("arguments_as_text", "arguments are rendered only if they are JSON text", one)
            trim = [self._body(text, header, thinking) if text else None for text in (one, two, none)]
            samples = CallSamples(trim[0] or "", trim[1], trim[2], ends, listed)
            return as_text, self._without_call_header(samples, header, thinking)
        return False, None

    def _without_call_header(self, samples: CallSamples, header: str, thinking: ThinkingFacts | None) -> CallSamples:
        """The samples without the header of a message that is addressed to the called tool: one call a message."""
        if thinking is None or not header.strip() or header.strip() not in thinking.closing:
            return samples
        marker = split_marker(thinking.opening)[-1]
        head, found, body = samples.one.partition(marker)
        if not found or NAME not in head or NAME not in body:
            return samples
        self._call_header = head + found
        self._note("call_header", "calls are in messages that are addressed to the tool", samples.one)
        none = samples.none.partition(marker)[2] if samples.none else None
        return replace(samples, one=body, two=None, none=none)

    def _body(self, written: str, header: str, thinking: ThinkingFacts | None) -> str:
        """The reply without its header, an empty thought and an empty answer."""
        body = _without_prefix(written, header)
        if thinking and (at := body.find(thinking.closer)) >= 0 and at < body.find(NAME):
            body = body[at + len(thinking.closer) :]
        for frame in (self._answer_frame, self._called_text):
            opening, closing = (re.escape(text.strip()) for text in frame)
            body = re.sub(rf"\A\s*{opening}\s*{closing}", "", body) if closing else body
        return body

    def _space_before_calls(self, syntax: syntaxes.CallSyntax | None, as_text: bool) -> str:
        space = self._space(syntax, {"content": ANSWER}, ANSWER, as_text)
        if space:
            self._note("space_before_calls", "the text between an answer and a call", f"{ANSWER}{space}")
        return space or ""

    def _space(
        self, syntax: syntaxes.CallSyntax | None, message: dict[str, Any], mark: str, as_text: bool, **variables: Any
    ) -> str | None:
        """The text between a mark in the message and the calls after it. None if the template does not show it."""
        called = {**message, "tool_calls": sample_calls(1, as_text)}
        written = self._prober.reply(called, tools=sample_tools(), **variables)
        place = written.rfind(mark, 0, max(written.find(NAME), 0)) if written else -1
        if not written or not syntax or place < 0:
            return None
        after_mark = written[place + len(mark) :]
        first = syntaxes.start(syntax)
        at = after_mark.find(first)
        return after_mark[:at] if at >= 0 and (first == NAME or self._is_glue(after_mark[:at])) else None

    def _is_glue(self, text: str) -> bool:
        """Whether the text before calls holds nothing but the frame of an answer, or the header of another message."""
        opening, closing = ("".join(part.split()) for part in self._answer_frame)
        frames = ("", closing, opening + closing, self._called_text[1])
        header = self._header_text.strip()
        return "".join(text.split()) in frames or bool(header and text.strip().endswith(header))

    def _space_after_thought(
        self, syntax: syntaxes.CallSyntax | None, field: str | None, thinking: ThinkingFacts | None, as_text: bool
    ) -> str:
        if thinking is None:
            return ""
        space: str | None
        given = {"content": "", field: THOUGHT} if field and field != "content" else {"content": ""}
        mark = thinking.closing_before_calls.strip()
        for message in (given, {"content": ""}):
            space = self._space(syntax, message, mark, as_text, **self._thinking_variables)
            if space is not None:
                self._note("space_after_thought", "the text between a thought and a call", f"{mark}{space}")
                return space
        space = _trailing_space(thinking.closing)
        if space:
            seen = f"{thinking.closing}{ANSWER}"
            self._note("space_after_thought", "the same as before an answer", seen, Confidence.INFERRED)
        return space

    def _calls_in_thought(
        self, syntax: syntaxes.CallSyntax | None, field: str | None, thinking: ThinkingFacts | None, as_text: bool
    ) -> bool:
        """Whether a call may stand in an open thought: the template writes one there, or its marker can't be text."""
        first = next(iter(split_marker(syntaxes.opening(syntax), self._control)), "") if syntax else ""
        if thinking is None or not first:
            return False
        message = {"content": "", "tool_calls": sample_calls(1, as_text), **({field: THOUGHT} if field else {})}
        given = {"tools": sample_tools(), **self._thinking_variables}
        written = self._prober.reply(message, **given) or "" if field != "content" else ""
        between = written.partition(THOUGHT)[2].partition(NAME)[0]
        if first in between and thinking.closer not in between:
            self._note("calls_in_thought", "a call follows a thought that is not closed", written)
            return True
        if looks_special(first):
            self._note("calls_in_thought", "the marker of calls is no ordinary text", first, Confidence.INFERRED)
            return True
        return False

    def _call_ends(self, samples: CallSamples, syntax: syntaxes.CallSyntax, ends: tuple[str, ...]) -> tuple[str, ...]:
        """The marker after calls, if it is no part of the syntax and does not end an answer."""
        _, last_argument, tail = samples.one.rpartition(str(NUMBER_VALUE))
        if not last_argument:
            return ()
        syntax_text = repr(syntax)
        for part in split_marker(tail):
            if part in ends:
                return ()
            named = any(name in part for name in (NAME, *ARGUMENTS))
            if CONTROL_LIKE.fullmatch(part) and part not in syntax_text and not named:
                self._note("turn_ends", "the text after calls", tail)
                return (part,)
        return ()

    def _calls_from_instructions(self) -> syntaxes.CallSyntax | None:
        """A template that renders tools but no calls may describe the syntax of calls in its instructions."""
        prompt = self._prober.render([user_message()], True, tools=sample_tools())
        if prompt is None or TEXT_KEY not in prompt:
            return None
        syntax = learn_from_instructions(prompt, list(self._prober.texts()), self._control)
        if syntax is not None:
            self._note("calls", "instructions or control tokens say how to call", prompt[:400], Confidence.INFERRED)
            return syntax
        if self._prober.call_reply(1, False) is None and self._prober.call_reply(1, True) is None:
            return None  # it refuses calls
        seen = "the prompt lists the tools, and calls are neither described nor rendered"
        self._note("calls", "the usual syntax of models without instructions", seen, Confidence.CONVENTION)
        return CONVENTION_OF_CALLS


def _without_prefix(written: str, header: str) -> str:
    """The text without the header, or without the last part of the header if it starts with that."""
    starts = [0, *(tag.start() for tag in CONTROL_LIKE.finditer(header))]
    prefix = next((header[at:] for at in starts if header[at:] and written.startswith(header[at:])), "")
    return written[len(prefix) :]


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]


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
