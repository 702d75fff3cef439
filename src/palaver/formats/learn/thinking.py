"""Learns the markers of thinking: from a rendered field, from thinking that is cut out of contents, from the generation
prompt, or from instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from palaver.formats.facts import Confidence, ThinkingFacts
from palaver.formats.learn.probes import ANSWER, REASONING_FIELDS, RESULT, THOUGHT, Prober, user_message
from palaver.formats.markers import CONTROL_LIKE, are_paired, common_start, split_marker
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools

_END = "ENDq7"


class ThinkingLearner:
    """`note(about, fact, seen, confidence)` records the evidence for a fact."""

    def __init__(self, prober: Prober, note: Callable[..., None]) -> None:
        self._prober = prober
        self._note = note
        self.variables: dict[str, Any] = {}
        """The variables with which the template renders thinking, if it does so only with some."""

    def learn(self) -> tuple[str | None, ThinkingFacts | None]:
        """The message field for thinking, and the markers of a thought."""
        field, found = self._by_field()
        if field is None and found is None:
            field, found = self._by_switched_field()
        found = found or self._by_split() or self._by_closed_block()
        return field, found or self._by_instruction()

    def _by_switched_field(self) -> tuple[str | None, ThinkingFacts | None]:
        """Some templates render thinking only if a variable is set."""
        for chosen in self._prober.variations():
            field, found = self._by_field(self._replies_with_answers(**chosen))
            if found is not None:
                self.variables = chosen
                return field, found
        return None, None

    def _by_field(self, shown: Iterator[tuple[str, str, str]] | None = None) -> tuple[str | None, ThinkingFacts | None]:
        for field, written, after in shown or self._replies_with_thoughts():
            before, rest = written.split(THOUGHT, 1)
            closing = rest.split(after, 1)[0]
            if closing.strip() and (first_line := self._first_line(before)):
                self._note("reasoning_field", f"thinking is read from the field {field}", written)
                self._note("thinking", "the generation prompt writes its first line", first_line)
                return field, ThinkingFacts(first_line, closing, first_line=True)
            opening = self._without_header(before) if closing.strip() else ""
            self._note("reasoning_field", f"thinking is read from the field {field}", written)
            if closing.strip() and not opening.strip():
                opening = self._opener_for(closing, before)
            if not opening:
                return field, None
            self._note("thinking", "the text around a thought", f"{opening}{THOUGHT}{closing}")
            return field, ThinkingFacts(opening, closing)
        return None, None

    def _replies_with_thoughts(self) -> Iterator[tuple[str, str, str]]:
        """Replies that show a thought: the field, the rendered text, and the text that follows the thought."""
        yield from self._replies_with_answers()
        yield from self._replies_with_calls()

    def _replies_with_answers(self, /, **variables: Any) -> Iterator[tuple[str, str, str]]:
        for field in REASONING_FIELDS:
            written = self._prober.reply({"content": ANSWER, field: THOUGHT}, **variables)
            if written and THOUGHT in written and ANSWER in written.split(THOUGHT, 1)[1]:
                yield field, written, ANSWER
        typed = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        written = self._prober.reply({"content": typed}, **variables)
        shown = written is not None and "type" not in written.lower()  # else the parts were only printed
        if written and shown and THOUGHT in written and ANSWER in written.split(THOUGHT, 1)[1]:
            yield "content", written, ANSWER

    def _replies_with_calls(self) -> Iterator[tuple[str, str, str]]:
        result = {"role": "tool", "content": RESULT, "tool_call_id": "probeid01", "name": NAME}
        for field in REASONING_FIELDS:
            for as_text in (False, True):
                for content in (ANSWER, ""):
                    message = {
                        "role": "assistant",
                        "content": content,
                        "tool_calls": sample_calls(1, as_text),
                        field: THOUGHT,
                    }
                    for tail in ([], [result]):
                        written = self._prober.render([user_message(), message, *tail], tools=sample_tools())
                        if written is None or THOUGHT not in written:
                            continue
                        question = self._prober.render([user_message()], tools=sample_tools()) or ""
                        start = written[len(common_start(question, written)) :]
                        rest = start.split(THOUGHT, 1)[1]
                        if content and ANSWER in rest and NAME not in rest.split(ANSWER)[0]:
                            yield field, start, ANSWER
                        elif (found := CONTROL_LIKE.search(rest)) and not rest[: found.start()].strip():
                            cut = len(start) - len(rest) + found.end()
                            yield field, start[:cut] + _END + start[cut:], _END

    def _opener_for(self, closing: str, before: str) -> str:
        """The opening that pairs with a closing, if it can't be separated from the header."""
        closer = next((part for part in split_marker(closing) if CONTROL_LIKE.fullmatch(part)), "")
        opener = closer.replace("/", "", 1)
        at = before.rfind(opener)
        return before[at:] if opener and at >= 0 else ""

    def _first_line(self, before: str) -> str:
        """The words after the header in a generation prompt, if nothing is written before a thought in a history."""
        plain = self._prober.reply({"content": ANSWER})
        if plain is None or not before or plain.partition(ANSWER)[0] != before:
            return ""
        rests = (opening.removeprefix(before) for opening in self._openings() if opening.startswith(before))
        return next((rest for rest in rests if rest.strip() and not CONTROL_LIKE.search(rest)), "")

    def _without_header(self, before: str) -> str:
        """The text between the header and a thought."""
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
        """The generation prompts, with every variable that changes it."""
        found = [self._prober.opening()]
        found += [self._prober.opening(**chosen) for chosen in self._prober.variations()]
        return list(dict.fromkeys(opening for opening in found if opening))

    def _by_split(self) -> ThinkingFacts | None:
        """A template that cuts thinking out of past contents: the closing marker is the tag that cuts it."""
        tags = dict.fromkeys(tag for text in self._prober.texts() for tag in CONTROL_LIKE.findall(text))
        for closer in (tag for tag in tags if "/" in tag):
            written = self._cut_out(f"{THOUGHT}{closer}{ANSWER}")
            if written is None:
                continue
            self._note("thinking", f"past thinking up to {closer} is dropped", written, Confidence.INFERRED)
            opener = closer.replace("/", "", 1)
            opening = next((o[o.rfind(opener) :] for o in self._openings() if opener in o), opener)
            opening = opening.split(closer)[0]
            return ThinkingFacts(opening, self._closing_after(closer, opening))
        return None

    def _cut_out(self, content: str) -> str | None:
        """The rendered content if its thought was cut out, in the last turn or in an earlier one."""
        for written in (self._prober.reply({"content": content}), self._prober.earlier_reply(content)):
            if written is not None and ANSWER in written and THOUGHT not in written:
                return written
        return None

    def _closing_after(self, closer: str, opening: str) -> str:
        """The closing with line breaks, if the template drops line breaks after a thought."""
        written = self._cut_out(f"{THOUGHT}{closer}\n\n{ANSWER}")
        plain = self._prober.reply({"content": ANSWER}), self._prober.earlier_reply(ANSWER)
        if opening.endswith("\n") and written in plain:
            return f"\n{closer}\n"
        return self._closing_in_prompt(closer)

    def _closing_in_prompt(self, closer: str) -> str:
        """The closing in a generation prompt that closes a thought, else the marker alone."""
        for opening in self._openings():
            if closer in opening:
                before, after = opening.rsplit(closer, 1)
                space = before[len(before.rstrip()) :]
                return (space[1:] if space.count("\n") > 1 else "") + closer + after
        return closer

    def _by_closed_block(self) -> ThinkingFacts | None:
        """A generation prompt that opens and closes a thought shows both markers."""
        openings = self._openings()
        for longer in openings:
            for shorter in sorted(openings, key=len):
                rest = longer.removeprefix(common_start(longer, shorter))
                found = list(CONTROL_LIKE.finditer(rest))
                if len(found) == 2 and are_paired(found[0][0], found[1][0]) and not rest[: found[0].start()].strip():
                    self._note("thinking", "a thought is opened and closed by the generation prompt", longer)
                    inside = rest[found[0].end() : found[1].start()]
                    return _from_closed_block(rest[: found[0].end()], inside, rest[found[1].start() :])
        whole = next((o for o in openings if len(CONTROL_LIKE.findall(o)) >= 3), "")
        return self._by_trailing_block(whole)

    def _by_trailing_block(self, opening: str) -> ThinkingFacts | None:
        tags = list(CONTROL_LIKE.finditer(opening))
        if len(tags) < 2 or opening[tags[-1].end() :].strip() or not are_paired(tags[-2][0], tags[-1][0]):
            return None
        self._note("thinking", "a thought is opened and closed by the generation prompt", opening)
        inside = opening[tags[-2].end() : tags[-1].start()]
        return _from_closed_block(opening[tags[-2].start() : tags[-2].end()], inside, opening[tags[-1].start() :])

    def _by_instruction(self) -> ThinkingFacts | None:
        """A system prompt that asks for thinking between two tags."""
        for chosen in self._prober.variations():
            prompt = self._prober.render([user_message()], True, **chosen) or ""
            found = re.search(r"(<(\w*think\w*)>)\s*(?:\.\.\.)?\s*(</\2>)", prompt)
            if found:
                fact = f"with {next(iter(chosen))} the system prompt asks for thoughts in tags"
                self._note("thinking", fact, prompt, Confidence.INFERRED)
                return self._with_prompt_space(ThinkingFacts(found[1], found[3]))
        for text in self._prober.texts():
            found = re.search(r"(<(\w*think\w*)>)[^<]*(</\2>)", text)
            if found:
                self._note("thinking", "the template writes thoughts in tags", text, Confidence.INFERRED)
                return self._with_prompt_space(ThinkingFacts(found[1], found[3]))
        return None

    def _with_prompt_space(self, thinking: ThinkingFacts) -> ThinkingFacts:
        """The facts with the white space after the opener in the generation prompt, if it writes an opener."""
        for opening in self._openings():
            if thinking.opener in opening and thinking.closer not in opening:
                return replace(thinking, opening=opening[opening.rfind(thinking.opener) :])
        return thinking


def _from_closed_block(opener: str, inside: str, closing: str) -> ThinkingFacts:
    """The facts from an empty thought: the white space between its markers belongs half to each."""
    word = inside.strip()
    if word:
        at = inside.index(word) + len(word)
        return ThinkingFacts(opener + inside[:at] + inside[at : at + 1], inside[at + 1 :] + closing)
    half = (len(inside) + 1) // 2
    return ThinkingFacts(opener + inside[:half], inside[half:] + closing)
