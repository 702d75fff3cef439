"""Learns how thoughts are marked: from a field that is rendered, from what is cut out, from blocks closed at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from palaver.formats.facts import Confidence, ThinkingFacts
from palaver.formats.learn.probes import ANSWER, REASONING_FIELDS, RESULT, THOUGHT, Prober, probe_messages
from palaver.formats.markers import CONTROL_LIKE, common_start, paired, split_marker
from palaver.formats.tool_calls.samples import NAME, sample_calls, sample_tools

_END = "ENDq7"


class ThinkingLearner:
    """`note(about, fact, seen, confidence)` takes down what a fact was learned from."""

    def __init__(self, prober: Prober, note: Callable[..., None]) -> None:
        self._prober = prober
        self._note = note

    def learn(self) -> tuple[str | None, ThinkingFacts | None]:
        """The field that takes a message's thinking, and how thoughts are marked."""
        field, found = self._by_field()
        found = found or self._by_split() or self._by_closed_block()
        if field is None and found is None:
            field, found = self._by_switched_field()
        return field, found or self._by_instruction()

    def _by_switched_field(self) -> tuple[str | None, ThinkingFacts | None]:
        """Some templates take thoughts only where a variable says so."""
        for chosen in self._prober.variations():
            field, found = self._by_field(self._shown_thoughts(**chosen))
            if found is not None:
                return field, found
        return None, None

    def _by_field(self, shown: Iterator[tuple[str, str, str]] | None = None) -> tuple[str | None, ThinkingFacts | None]:
        for field, written, after in shown or self._with_thoughts():
            before, rest = written.split(THOUGHT, 1)
            closing = rest.split(after, 1)[0]
            opening = self._without_header(before) if closing.strip() else ""
            self._note("reasoning_field", f"thinking is given as {field}", written)
            if closing.strip() and not opening.strip():
                opening = self._opener_for(closing, before)
            if not opening:
                return field, None
            self._note("thinking", "what stands around a thought", f"{opening}{THOUGHT}{closing}")
            return field, ThinkingFacts(opening, closing)
        return None, None

    def _with_thoughts(self) -> Iterator[tuple[str, str, str]]:
        """Replies in which a thought is shown: the field, what was written, and what comes behind the thought."""
        yield from self._shown_thoughts()
        yield from self._with_thoughts_before_calls()

    def _shown_thoughts(self, **variables: Any) -> Iterator[tuple[str, str, str]]:
        for field in REASONING_FIELDS:
            written = self._prober.reply({"content": ANSWER, field: THOUGHT}, **variables)
            if written and THOUGHT in written and ANSWER in written.split(THOUGHT, 1)[1]:
                yield field, written, ANSWER
        typed = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        written = self._prober.reply({"content": typed}, **variables)
        shown = written is not None and "type" not in written.lower()  # else the parts were only printed
        if written and shown and THOUGHT in written and ANSWER in written.split(THOUGHT, 1)[1]:
            yield "content", written, ANSWER

    def _with_thoughts_before_calls(self) -> Iterator[tuple[str, str, str]]:
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
                        written = self._prober.write([probe_messages(), message, *tail], tools=sample_tools())
                        if written is None or THOUGHT not in written:
                            continue
                        asked = self._prober.write([probe_messages()], tools=sample_tools()) or ""
                        start = written[len(common_start(asked, written)) :]
                        behind = start.split(THOUGHT, 1)[1]
                        if content and ANSWER in behind and NAME not in behind.split(ANSWER)[0]:
                            yield field, start, ANSWER
                        elif (found := CONTROL_LIKE.search(behind)) and not behind[: found.start()].strip():
                            cut = len(start) - len(behind) + found.end()
                            yield field, start[:cut] + _END + start[cut:], _END

    def _opener_for(self, closing: str, before: str) -> str:
        """The opening that belongs to a closing, where the header's end and it can't be told apart."""
        closer = next((part for part in split_marker(closing) if CONTROL_LIKE.fullmatch(part)), "")
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
        found += [self._prober.opening(**chosen) for chosen in self._prober.variations()]
        return list(dict.fromkeys(opening for opening in found if opening))

    def _by_split(self) -> ThinkingFacts | None:
        """A template that cuts thinking out of past contents shows its closing marker by what vanishes."""
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
        """What a template writes that cuts the thought out of a content, in the last turn or in an earlier one."""
        for written in (self._prober.reply({"content": content}), self._prober.followed(content)):
            if written is not None and ANSWER in written and THOUGHT not in written:
                return written
        return None

    def _closing_after(self, closer: str, opening: str) -> str:
        """A template that drops the line breaks behind a thought's end shows that the model writes some."""
        written = self._cut_out(f"{THOUGHT}{closer}\n\n{ANSWER}")
        plain = self._prober.reply({"content": ANSWER}), self._prober.followed(ANSWER)
        if opening.endswith("\n") and written in plain:
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
                if len(found) == 2 and paired(found[0][0], found[1][0]) and not rest[: found[0].start()].strip():
                    self._note("thinking", "a thought is opened and closed by the generation prompt", longer)
                    inside = rest[found[0].end() : found[1].start()]
                    return _from_closed_block(rest[: found[0].end()], inside, rest[found[1].start() :])
        whole = next((o for o in openings if len(CONTROL_LIKE.findall(o)) >= 3), "")
        return self._closed_at_the_end(whole)

    def _closed_at_the_end(self, opening: str) -> ThinkingFacts | None:
        tags = list(CONTROL_LIKE.finditer(opening))
        if len(tags) < 2 or opening[tags[-1].end() :].strip() or not paired(tags[-2][0], tags[-1][0]):
            return None
        self._note("thinking", "a thought is opened and closed by the generation prompt", opening)
        inside = opening[tags[-2].end() : tags[-1].start()]
        return _from_closed_block(opening[tags[-2].start() : tags[-2].end()], inside, opening[tags[-1].start() :])

    def _by_instruction(self) -> ThinkingFacts | None:
        """A system prompt that asks for thoughts between two tags names them."""
        for chosen in self._prober.variations():
            told = self._prober.write([probe_messages()], True, **chosen) or ""
            found = re.search(r"(<(\w*think\w*)>)\s*(?:\.\.\.)?\s*(</\2>)", told)
            if found:
                fact = f"with {next(iter(chosen))} the system prompt asks for thoughts in tags"
                self._note("thinking", fact, told, Confidence.INFERRED)
                return self._opened_by_prompt(ThinkingFacts(found[1], found[3]))
        for text in self._prober.texts():
            found = re.search(r"(<(\w*think\w*)>)[^<]*(</\2>)", text)
            if found:
                self._note("thinking", "the template writes thoughts in tags", text, Confidence.INFERRED)
                return self._opened_by_prompt(ThinkingFacts(found[1], found[3]))
        return None

    def _opened_by_prompt(self, thinking: ThinkingFacts) -> ThinkingFacts:
        """With the white space that the generation prompt writes behind the opener, where it does."""
        for opening in self._openings():
            if thinking.opener in opening and thinking.closer not in opening:
                return replace(thinking, opening=opening[opening.rfind(thinking.opener) :])
        return thinking


def _from_closed_block(opener: str, inside: str, closing: str) -> ThinkingFacts:
    """An empty thought has the white space of both sides between its markers, and maybe a word of the opening."""
    word = inside.strip()
    if word:
        at = inside.index(word) + len(word)
        return ThinkingFacts(opener + inside[:at] + inside[at : at + 1], inside[at + 1 :] + closing)
    half = (len(inside) + 1) // 2
    return ThinkingFacts(opener + inside[:half], inside[half:] + closing)
