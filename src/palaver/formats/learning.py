"""Learns how a model talks from its chat template: probes are rendered and compared.

Nothing here knows a model or a template by name. What no probe shows is not a fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jinja2 import nodes

from palaver.formats.calls import syntaxes
from palaver.formats.calls.samples import NAME, Samples, calls, tools
from palaver.formats.facts import Evidence, Facts, Switch, ThinkingFacts
from palaver.formats.markers import CONTROL_LIKE, common_start, parts
from palaver.formats.probes import ANSWER, QUESTION, REASONING_FIELDS, RESULT, THOUGHT, Prober, ask
from palaver.formats.template import Template

CONVENTION = ThinkingFacts("<think>\n", "\n</think>\n\n", by_convention=True)
_END = "ENDq7"
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
        field, thinking = self._thinking()
        header = self._header(thinking)
        ends = self._turn_ends()
        as_text, samples = self._samples(header, thinking, ends)
        call_syntax = syntaxes.learn(samples) if samples else None
        if call_syntax is None:
            call_syntax = self._calls_from_instructions()
        if samples and call_syntax:
            self._note(f"tool calls are {syntaxes.family(call_syntax)}", samples.one)
            ends = (*ends, *self._call_ends(samples, call_syntax, ends))
        opening, closing = self._answer(header, thinking, ends)
        return Facts(
            header=header,
            reasoning_field=field,
            thinking=thinking,
            switch=self._switch(thinking),
            keeps_thinking=self._keeps(field),
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

    def _note(self, fact: str, seen: str) -> None:
        self._evidence.append(Evidence(fact, seen))

    # -- thinking ------------------------------------------------------------------------------------------------

    def _thinking(self) -> tuple[str | None, ThinkingFacts | None]:
        field, by_field = self._by_field()
        found = by_field or self._by_split() or self._by_closed_block() or self._by_instruction()
        return field, found

    def _by_field(self) -> tuple[str | None, ThinkingFacts | None]:
        for field, written, after in self._with_thoughts():
            before, rest = written.split(THOUGHT, 1)
            closing = rest.split(after, 1)[0]
            opening = self._without_header(before)
            self._note(f"thinking is given as {field}", written)
            if opening.strip() and closing.strip():
                return field, ThinkingFacts(opening, closing)
            if closing.strip():
                opened = self._opener_for(closing, before)
                return field, ThinkingFacts(opened, closing) if opened else None
            return field, None
        return None, None

    def _with_thoughts(self) -> Iterator[tuple[str, str, str]]:
        """Replies in which a thought is shown: the field, what was written, and what comes behind the thought."""
        for field in REASONING_FIELDS:
            written = self._prober.reply({"content": ANSWER, field: THOUGHT})
            if written and THOUGHT in written and ANSWER in written.split(THOUGHT, 1)[1]:
                yield field, written, ANSWER
        typed = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        written = self._prober.reply({"content": typed})
        shown = written is not None and "type" not in written.lower()  # else the parts were only printed
        if written and shown and THOUGHT in written and ANSWER in written.split(THOUGHT, 1)[1]:
            yield "content", written, ANSWER
        yield from self._with_thoughts_before_calls()

    def _with_thoughts_before_calls(self) -> Iterator[tuple[str, str, str]]:
        result = {"role": "tool", "content": RESULT, "tool_call_id": "probeid01", "name": NAME}
        for field in REASONING_FIELDS:
            for as_text in (False, True):
                for content in (ANSWER, ""):
                    message = {"role": "assistant", "content": content, "tool_calls": calls(1, as_text), field: THOUGHT}
                    for tail in ([], [result]):
                        written = self._prober.write([ask(), message, *tail], tools=tools())
                        if written is None or THOUGHT not in written:
                            continue
                        asked = self._prober.write([ask()], tools=tools()) or ""
                        start = written[len(common_start(asked, written)) :]
                        behind = start.split(THOUGHT, 1)[1]
                        if content and ANSWER in behind and NAME not in behind.split(ANSWER)[0]:
                            yield field, start, ANSWER
                        elif (found := CONTROL_LIKE.search(behind)) and not behind[: found.start()].strip():
                            cut = len(start) - len(behind) + found.end()
                            yield field, start[:cut] + _END + start[cut:], _END

    def _opener_for(self, closing: str, before: str) -> str:
        """The opening that belongs to a closing, where the header's end and it can't be told apart."""
        closer = next((part for part in parts(closing) if CONTROL_LIKE.fullmatch(part)), "")
        opener = closer.replace("/", "", 1)
        at = before.rfind(opener)
        return before[at:] if opener and at >= 0 else ""

    def _without_header(self, before: str) -> str:
        """What stands between the header and a thought."""
        for opening in self._openings():
            shared = common_start(opening, before)
            at = before.rfind(shared) if shared.strip() else -1
            if at >= 0 and shared.strip() and before.startswith(shared):
                rest = before[len(shared) :]
                if rest.strip():
                    return rest
        tags = list(CONTROL_LIKE.finditer(before.rstrip()))
        return before[tags[-1].start() :] if tags and tags[-1].end() == len(before.rstrip()) else ""

    def _openings(self) -> list[str]:
        """The ways in which a generation prompt may open, by every switch that changes it."""
        found = [self._prober.opening()]
        for variable in self._prober.variables():
            found += [self._prober.opening(**{variable: value}) for value in (True, False)]
        return list(dict.fromkeys(opening for opening in found if opening))

    def _by_split(self) -> ThinkingFacts | None:
        """A template that cuts thinking out of past contents shows its closing marker by what vanishes."""
        tags = dict.fromkeys(tag for text in self._prober.texts() for tag in CONTROL_LIKE.findall(text))
        for closer in (tag for tag in tags if "/" in tag):
            written = self._cut_out(f"{THOUGHT}{closer}{ANSWER}")
            if written is None:
                continue
            self._note(f"past thinking up to {closer} is dropped", written)
            opener = closer.replace("/", "", 1)
            opening = next((o[o.rfind(opener) :] for o in self._openings() if opener in o), opener)
            opening = opening.split(closer)[0]
            return ThinkingFacts(opening, self._closing_after(closer, opening))
        return None

    def _cut_out(self, content: str) -> str | None:
        """What a template writes that cuts the thought out of a content, in the last turn or in an earlier one."""
        for written in (self._prober.reply({"content": content}), self._followed(content)):
            if written is not None and ANSWER in written and THOUGHT not in written:
                return written
        return None

    def _closing_after(self, closer: str, opening: str) -> str:
        """A template that drops the line breaks behind a thought's end shows that the model writes some."""
        written = self._cut_out(f"{THOUGHT}{closer}\n\n{ANSWER}")
        if opening.endswith("\n") and written in (self._prober.reply({"content": ANSWER}), self._followed(ANSWER)):
            return f"\n{closer}\n"
        return self._closing_of(closer)

    def _closing_of(self, closer: str) -> str:
        """How the template writes the closing where it shows it: in a block that it closes itself."""
        for opening in self._openings():
            if closer in opening:
                before, after = opening.rsplit(closer, 1)
                space = before[len(before.rstrip()) :]
                return (space[1:] if space.count("\n") > 1 else "") + closer + after
        return closer

    def _by_closed_block(self) -> ThinkingFacts | None:
        """A generation prompt that closes a thought at once shows both markers."""
        openings = self._openings()
        for longer in openings:
            for shorter in sorted(openings, key=len):
                rest = longer.removeprefix(common_start(longer, shorter))
                found = list(CONTROL_LIKE.finditer(rest))
                if len(found) == 2 and _pair(found[0][0], found[1][0]) and not rest[: found[0].start()].strip():
                    self._note("a thought is opened and closed by the generation prompt", longer)
                    inside = rest[found[0].end() : found[1].start()]
                    return _from_closed_block(rest[: found[0].end()], inside, rest[found[1].start() :])
        whole = next((o for o in openings if len(CONTROL_LIKE.findall(o)) >= 3), "")
        return self._closed_at_the_end(whole)

    def _closed_at_the_end(self, opening: str) -> ThinkingFacts | None:
        tags = list(CONTROL_LIKE.finditer(opening))
        if len(tags) < 2 or opening[tags[-1].end() :].strip() or not _pair(tags[-2][0], tags[-1][0]):
            return None
        self._note("a thought is opened and closed by the generation prompt", opening)
        inside = opening[tags[-2].end() : tags[-1].start()]
        return _from_closed_block(opening[tags[-2].start() : tags[-2].end()], inside, opening[tags[-1].start() :])

    def _by_instruction(self) -> ThinkingFacts | None:
        """A system prompt that asks for thoughts between two tags names them."""
        for variable in self._prober.variables():
            for value in (True, "high"):
                told = self._prober.write([ask()], True, **{variable: value}) or ""
                found = re.search(r"(<(\w*think\w*)>)\s*(?:\.\.\.)?\s*(</\2>)", told)
                if found:
                    self._note(f"with {variable} the system prompt asks for thoughts in tags", told)
                    return self._opened_by_prompt(ThinkingFacts(found[1], found[3]))
        for text in self._prober.texts():
            found = re.search(r"(<(\w*think\w*)>)[^<]*(</\2>)", text)
            if found:
                self._note("the template writes thoughts in tags", text)
                return self._opened_by_prompt(ThinkingFacts(found[1], found[3]))
        return None

    def _opened_by_prompt(self, thinking: ThinkingFacts) -> ThinkingFacts:
        """With the white space that the generation prompt writes behind the opener, where it does."""
        for opening in self._openings():
            if thinking.opener in opening and thinking.closer not in opening:
                return replace(thinking, opening=opening[opening.rfind(thinking.opener) :])
        return thinking

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
        return header

    def _turn_ends(self) -> tuple[str, ...]:
        """What follows an answer ends the turn, and so does the tokenizer's own end."""
        ends = [self._strings["eos_token"]] if self._strings.get("eos_token") else []
        for written in (self._prober.reply({"content": ANSWER}), self._followed()):
            if written and ANSWER in written:
                after = written.split(ANSWER, 1)[1]
                self._note("what follows an answer", after[:200])
                before = CONTROL_LIKE.findall(
                    _without_prefix(written.split(ANSWER, 1)[0], self._prober.opening() or "")
                )
                found = [part for part in parts(after, self._control) if self._is_control(part)]
                while found and any(_pair(tag, found[0]) for tag in before):
                    found = found[1:]
                ends += found[:1]
        return tuple(dict.fromkeys(ends))

    def _followed(self, content: str = ANSWER) -> str | None:
        """An answer with another question behind it: some templates treat only such turns as past."""
        whole = self._prober.write([ask(), {"role": "assistant", "content": content}, ask()])
        return None if whole is None else whole[whole.index(QUESTION) + len(QUESTION) :]

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

    def _keeps(self, field: str | None) -> bool:
        if field is None:
            return False
        said: Any = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        message = {"role": "assistant", "content": said if field == "content" else ANSWER}
        if field != "content":
            message[field] = THOUGHT
        whole = self._prober.write([ask(), message, ask()], True)
        return whole is not None and THOUGHT in whole

    # -- tool calls ----------------------------------------------------------------------------------------------

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
        from palaver.formats.calls.instructions import from_instructions

        syntax = from_instructions(told, plain, list(self._prober.texts()))
        if syntax is not None:
            self._note("the tools' description says how to call", told[:400])
        return syntax


def _without_prefix(written: str, header: str) -> str:
    """The text without the header, or without that end of it that it begins with."""
    starts = [0, *(tag.start() for tag in CONTROL_LIKE.finditer(header))]
    shown = next((header[at:] for at in starts if header[at:] and written.startswith(header[at:])), "")
    return written[len(shown) :]


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]


def _pair(opener: str, closer: str) -> bool:
    """Whether two markers are the two sides of one block."""
    bare = re.sub(r"[^\w]", "", opener)
    other = re.sub(r"[^\w]", "", closer)
    return opener != closer and bool(bare) and (bare == other or other in (f"end{bare}", bare.replace("START", "END")))


def _from_closed_block(opener: str, inside: str, closing: str) -> ThinkingFacts:
    """An empty thought has the white space of both sides between its markers, and maybe a word of the opening."""
    word = inside.strip()
    if word:
        at = inside.index(word) + len(word)
        return ThinkingFacts(opener + inside[:at] + inside[at : at + 1], inside[at + 1 :] + closing)
    half = (len(inside) + 1) // 2
    return ThinkingFacts(opener + inside[:half], inside[half:] + closing)
