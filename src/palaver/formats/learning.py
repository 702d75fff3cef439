"""Learns how a model talks from its chat template: probes are rendered and compared.

Nothing here knows a model or a template by name. What no probe shows is not a fact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import nodes

from palaver.formats.calls import syntaxes
from palaver.formats.calls.instructions import from_instructions
from palaver.formats.calls.samples import NAME, Samples, calls, tools
from palaver.formats.facts import Confidence, Evidence, Facts, Switch, ThinkingFacts
from palaver.formats.markers import CONTROL_LIKE, common_start, paired, parts
from palaver.formats.probes import ANSWER, THOUGHT, Prober, ask
from palaver.formats.template import Template
from palaver.formats.thoughts import Thoughts

CONVENTION = ThinkingFacts("<think>\n", "\n</think>\n\n", by_convention=True)
_VALUES: tuple[Any, ...] = (True, False, "low", "medium", "high", "none", "no_think", "disabled", "enabled", 0)


def learn(template: Template, strings: Mapping[str, str], control: Mapping[str, int]) -> Facts:
    """`strings` are the tokenizer's named tokens (bos_token, ...), `control` its tokens by their text."""
    return Learner(Prober(template, strings), strings, control).learn()


class Learner:
    def __init__(self, prober: Prober, strings: Mapping[str, str], control: Mapping[str, int]) -> None:
        self._prober = prober
        self._strings = strings
        self._control = control
        self._evidence: list[Evidence] = []

    def learn(self) -> Facts:
        field, thinking = Thoughts(self._prober, self._note).learn()
        header = self._header(thinking)
        ends = self._turn_ends()
        as_text, samples = self._samples(header, thinking, ends)
        call_syntax, call_ends = self._call_syntax(samples, ends)
        ends = (*ends, *call_ends)
        opening, closing = self._answer(header, thinking, ends)
        keeps, keeping = self._keeps(field)
        return Facts(
            header=header,
            reasoning_field=field,
            thinking=thinking,
            switch=self._switch(thinking),
            keeps_thinking=keeps,
            keeping=keeping,
            answer_opening=opening,
            answer_closing=closing,
            turn_ends=ends,
            calls=call_syntax,
            stop_strings=self._declared("stop_strings", "stop"),
            space_before_calls=self._space(call_syntax, {"content": ANSWER}, ANSWER, as_text),
            space_after_thought=self._space_after_thought(call_syntax, field, thinking, as_text),
            no_tools=self._prober.no_tools,
            asks_for=tuple(self._prober.variables()),
            arguments_as_text=as_text,
            evidence=tuple(self._evidence),
        )

    def _note(self, fact: str, seen: str, confidence: Confidence = Confidence.SEEN) -> None:
        self._evidence.append(Evidence(fact, seen, confidence))

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
            self._note("what opens the assistant's turn", header)
        return header

    def _turn_ends(self) -> tuple[str, ...]:
        """What follows an answer ends the turn, and so does the tokenizer's own end."""
        ends = [self._strings["eos_token"]] if self._strings.get("eos_token") else []
        for written in (self._prober.reply({"content": ANSWER}), self._prober.followed()):
            if written and ANSWER in written:
                after = written.split(ANSWER, 1)[1]
                self._note("what follows an answer", after[:200])
                before = CONTROL_LIKE.findall(
                    _without_prefix(written.split(ANSWER, 1)[0], self._prober.opening() or "")
                )
                found = [part for part in parts(after, self._control) if self._is_control(part)]
                while found and any(paired(tag, found[0]) for tag in before):
                    found = found[1:]
                ends += found[:1]
        return tuple(dict.fromkeys(ends))

    def _is_control(self, part: str) -> bool:
        return (
            part in self._control
            or bool(CONTROL_LIKE.fullmatch(part))
            or bool(re.fullmatch(r"[\[\]~\w]*~[\[\]~\w]*", part))
        )

    def _answer(self, header: str, thinking: ThinkingFacts | None, ends: tuple[str, ...]) -> tuple[str, str]:
        """What the model writes right before and behind an answer that follows no thought."""
        written = self._prober.reply({"content": ANSWER})
        if not written or ANSWER not in written:
            return "", ""
        before, after = written.split(ANSWER, 1)
        opening = _without_prefix(before, header)
        if thinking:
            for marker in (thinking.opener, thinking.closer):
                opening = opening.split(marker)[-1] if marker and marker in opening else opening
        cut = min((at for end in ends if (at := after.find(end)) >= 0), default=len(after))
        return (opening if opening.strip() else ""), (after[:cut] if after[:cut].strip() else "")

    def _declared(self, *names: str) -> tuple[str, ...]:
        """Texts that the template sets under one of these names at its top."""
        for node in self._prober.template.tree.body:
            if isinstance(node, nodes.Assign) and getattr(node.target, "name", "") in names:
                try:
                    value = node.node.as_const() if isinstance(node.node, nodes.Expr) else None
                except nodes.Impossible:
                    continue
                found = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
                self._note("the template declares what stops an answer", repr(found))
                return tuple(text for text in found if isinstance(text, str) and text)
        return ()

    # -- switches ------------------------------------------------------------------------------------------------

    def _switch(self, thinking: ThinkingFacts | None) -> Switch | None:
        for variable in self._prober.variables():
            shown = {repr(v): (v, self._prober.write([ask()], True, **{variable: v})) for v in _VALUES}
            on, off = shown["True"][1], shown["False"][1]
            if on is not None and off is not None and on != off and self._about_thinking(variable, on, off, thinking):
                self._note(f"{variable} switches thinking", f"on {on[-120:]!r} / off {off[-120:]!r}")
                return Switch(variable, True, False)
        return None

    def _about_thinking(self, variable: str, on: str, off: str, thinking: ThinkingFacts | None) -> bool:
        if thinking is None:
            return "think" in variable or "reason" in variable
        tail_on, tail_off = on[-400:], off[-400:]
        closed = thinking.closer
        opens = tail_on.rfind(thinking.opener) > tail_on.rfind(closed)
        shut = tail_off.rstrip().endswith(closed) and not tail_on.rstrip().endswith(closed)
        return (
            shut
            or (opens and not tail_off.rfind(thinking.opener) > tail_off.rfind(closed))
            or (("think" in variable or "reason" in variable) and closed in on + off)
        )

    def _keeps(self, field: str | None) -> tuple[bool, Switch | None]:
        """Whether the thinking of an earlier turn is kept, and the variable that changes it."""
        if field is None:
            return False, None
        kept = self._shows_past(field)
        self._note(f"thinking of earlier turns is {'kept' if kept else 'dropped'}", repr(field))
        for variable in self._prober.variables():
            on, off = (self._shows_past(field, **{variable: value}) for value in (True, False))
            if on != off:
                self._note(f"{variable} = {on} keeps the thinking of earlier turns", repr(field))
                return kept, Switch(variable, on, off)
        return kept, None

    def _shows_past(self, field: str, **variables: Any) -> bool:
        said: Any = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        message = {"role": "assistant", "content": said if field == "content" else ANSWER}
        if field != "content":
            message[field] = THOUGHT
        whole = self._prober.write([ask(), message, ask()], True, **variables)
        return whole is not None and THOUGHT in whole

    # -- tool calls ----------------------------------------------------------------------------------------------

    def _call_syntax(
        self, samples: Samples | None, ends: tuple[str, ...]
    ) -> tuple[syntaxes.CallSyntax | None, tuple[str, ...]]:
        """How calls are written, and what ends a turn of calls beside what ends any turn."""
        syntax = (syntaxes.learn(samples) if samples else None) or self._calls_from_instructions()
        if samples is None or syntax is None:
            return syntax, ()
        self._note(f"tool calls are {syntaxes.family(syntax)}", samples.one)
        return syntax, self._call_ends(samples, syntax, ends)

    def _samples(
        self, header: str, thinking: ThinkingFacts | None, ends: tuple[str, ...]
    ) -> tuple[bool, Samples | None]:
        for as_text in (False, True):
            one = self._prober.call_reply(1, as_text)
            if one is None or "first_key_q" not in one:
                continue
            two = self._prober.call_reply(2, as_text)
            none = self._prober.call_reply(1, as_text, {})
            trim = [self._body(text, header, thinking) if text else None for text in (one, two, none)]
            return as_text, Samples(trim[0] or "", trim[1], trim[2], ends)
        return False, None

    def _body(self, written: str, header: str, thinking: ThinkingFacts | None) -> str:
        """The reply without its header and without an empty thought."""
        body = _without_prefix(written, header)
        if thinking and (at := body.find(thinking.closer)) >= 0 and at < body.find(NAME):
            body = body[at + len(thinking.closer) :]
        return body

    def _space(self, syntax: syntaxes.CallSyntax | None, message: dict[str, Any], mark: str, as_text: bool) -> str:
        """What stands between something said and the calls behind it."""
        written = self._prober.reply({**message, "tool_calls": calls(1, as_text)}, tools=tools())
        first = next(iter(parts(syntaxes.opening(syntax))), NAME) if syntax else ""
        if not written or mark not in written or not first:
            return ""
        place = written.rfind(mark, 0, max(written.find(NAME), 0))
        behind = written[place + len(mark) :] if place >= 0 else ""
        at = behind.find(first)
        return behind[:at] if at >= 0 and (first == NAME or not behind[:at].strip()) else ""

    def _space_after_thought(
        self, syntax: syntaxes.CallSyntax | None, field: str | None, thinking: ThinkingFacts | None, as_text: bool
    ) -> str:
        if thinking is None:
            return ""
        if field and field != "content":
            space = self._space(syntax, {"content": "", field: THOUGHT}, thinking.closer, as_text)
            if space:
                return space
        return self._space(syntax, {"content": ""}, thinking.closer, as_text) or _trailing_space(thinking.closing)

    def _call_ends(self, samples: Samples, syntax: syntaxes.CallSyntax, ends: tuple[str, ...]) -> tuple[str, ...]:
        """The marker behind calls, where it is none of the syntax and not what ends an answer."""
        tail = samples.one[samples.one.rfind("47113") + 5 :]
        known = repr(syntax)
        for part in parts(tail):
            if part in ends:
                return ()
            if CONTROL_LIKE.fullmatch(part) and part not in known:
                return (part,)
        return ()

    def _calls_from_instructions(self) -> syntaxes.CallSyntax | None:
        """A template that tells of tools but not of calls may describe in its own words how to call."""
        told = self._prober.write([ask()], True, tools=tools())
        plain = self._prober.write([ask()], True) or ""
        if told is None or "first_key_q" not in told:
            return None
        syntax = from_instructions(told, plain, list(self._prober.texts()))
        if syntax is not None:
            self._note("the tools' description says how to call", told[:400], Confidence.INFERRED)
        return syntax


def _without_prefix(written: str, header: str) -> str:
    """The text without the header, or without that end of it that it begins with."""
    starts = [0, *(tag.start() for tag in CONTROL_LIKE.finditer(header))]
    shown = next((header[at:] for at in starts if header[at:] and written.startswith(header[at:])), "")
    return written[len(shown) :]


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]
