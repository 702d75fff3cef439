"""Fuzzes readers with valid and broken replies in every family: `python -m tests.formats.fuzz 100000`.

Replies get random words that are no part of any format. Each word must be in some event, and the events must not depend
on how the reply is split into tokens.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from palaver.commands.format_trials import PieceTokenizer
from palaver.events import AnswerDelta, Notice, ReadEvent, ThinkingDelta, ToolCallDelta, ToolCallOpened, fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.generation import Prompt
from palaver.messages import user
from tests.formats.families import FAMILIES, TOOLS, Family, Kind, make_format

_SCRAPS = ('"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", " ", "\n", "<", ">", "</", "|>", "é", "👋🏽",
           "```json\n", '{"name": ', '"arguments": {', "null", "-1.5e3", "look_up", "to=", "functions.")  # fmt: skip
_WORD = re.compile(r"w\d+q")


@dataclass
class Subject:
    """One family with one kind of tokenizer, ready to read."""

    family: Family
    kind: Kind
    format: TemplateFormat
    pieces: PieceTokenizer
    prompts: dict[tuple[bool | None, bool], Prompt]

    def read(self, tokens: list[int], thinks: bool | None, calls: bool, stops: tuple[str, ...] = ()) -> list[ReadEvent]:
        options = RenderOptions(thinking=thinks, calls=calls)
        reader = self.format.reader(self.prompts[thinks, calls], stops, TOOLS, options)
        events = reader.open()
        for token in tokens:
            events += reader.feed(token)
        return [*events, *reader.close()]


def subject(family: Family, kind: Kind) -> Subject:
    format, pieces = make_format(family, kind)
    tools = TOOLS if family.calls else ()
    prompts = {
        (thinks, calls): format.render([user("q")], tools, RenderOptions(thinking=thinks, calls=calls))
        for thinks in ((None, True, False) if format.facts.switch else (None,))
        for calls in (True, False)
    }
    return Subject(family, kind, format, pieces, prompts)


def broken(subject: Subject, rng: random.Random) -> str:
    """A reply of the family with random edits and random words."""
    markers = (*subject.family.markers, *re.findall(r"<[^<>\s]*>", " ".join(s.text for s in subject.family.replies)))
    text = rng.choice(subject.family.replies).text
    for number in range(rng.randint(0, 6)):
        at, size = rng.randint(0, len(text)), rng.randint(0, 12)
        match rng.randint(0, 6):
            case 0:
                text = text[:at] + text[at + size :]
            case 1:
                text = text[:at] + text[at : at + 3 * size] + text[at:]
            case 2:
                text = text[:at] + rng.choice(markers or ("<x>",)) + text[at:]
            case 3:
                text = text[:at] + rng.choice(_SCRAPS) + text[at:]
            case 4:
                text = text[:at]
            case 5:
                text = text + rng.choice(subject.family.replies).text
            case _:
                text = text[:at] + f" w{number}q " + text[at:]
    return text


def tokens(subject: Subject, text: str, rng: random.Random | None) -> list[int]:
    """The tokens of the reply, split at random if there is an `rng`."""
    out: list[int] = []
    for run in subject.pieces.runs(text):
        if isinstance(run, int):
            out.append(run)
        else:
            out += [subject.pieces.piece(data) for data in _cuts(run.replace("\0", "").encode(), rng)]
    return out


def _cuts(data: bytes, rng: random.Random | None) -> Iterator[bytes]:
    longest = rng.choice((1, 3, 9)) if rng else len(data)
    while data:
        size = rng.randint(1, longest) if rng else longest
        yield data[:size]
        data = data[size:]


def event_text(events: list[ReadEvent]) -> str:
    out = []
    for event in events:
        match event:
            case ThinkingDelta(text) | AnswerDelta(text) | ToolCallDelta(_, text) | Notice(text):
                out.append(text)
            case ToolCallOpened(_, call_id, name):
                out.append(f" {call_id} {name} ")
    return "".join(out)


def trial(subject: Subject, text: str, rng: random.Random, cuts: int = 1) -> str:
    """The error in how the reply is read; empty if there is none."""
    thinks, calls = rng.choice(list(subject.prompts))
    stops = rng.choice(((), (), ("tree", "w1q w"), ("\n\n",)))
    whole = subject.read(tokens(subject, text, None), thinks, calls, stops)
    for _ in range(cuts):
        cut = subject.read(tokens(subject, text, rng), thinks, calls, stops)
        if fold(cut) != fold(whole):
            return f"cut {fold(cut)} whole {fold(whole)}"
    text_of_events = event_text(whole)
    lost = [word for word in _WORD.findall(text) if word not in text_of_events]
    lost = [] if stops or _ends(subject, text) else lost
    return f"{lost} are in no event: {whole}" if lost else ""


def _ends(subject: Subject, text: str) -> bool:
    return any(end in text for end in subject.format.facts.turn_ends)


def main(count: int, seed: int) -> None:
    rng = random.Random(seed)
    subjects = [subject(family, kind) for family in FAMILIES.values() for kind in Kind]
    bad, started = 0, time.perf_counter()
    for number in range(count):
        chosen = subjects[number % len(subjects)]
        text = broken(chosen, rng)
        try:
            wrong = trial(chosen, text, rng)
        except Exception as error:
            wrong = f"{type(error).__name__} {error}"
        if wrong:
            bad += 1
            if bad <= 20:
                print(f"{chosen.family.name} ({chosen.kind}): {text!r}\n    {wrong}")
    took = time.perf_counter() - started
    print(f"{count - bad} of {count} random cuts read right, {len(subjects)} subjects, {took:.0f} s")
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main(*(int(given) for given in (*sys.argv[1:], "1000", "0")[:2]))
