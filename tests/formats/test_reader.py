"""Reading: the same events however the text is cut, nothing taken back, never half a character."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.events import AnswerDelta, PhaseOpened, ReadEvent, ThinkingDelta, fold
from palaver.formats.reader import ReaderOptions, ReplyReader
from palaver.generation import Prompt
from palaver.messages import Message, user
from palaver.phases import Phase, Phases, State, Tracker, Trigger
from tests.formats.families import FAMILIES, TOOLS, ids, make_format
from tests.pieces import Pieces, cuts

OPENER, CLOSER, END = 0, 1, 2
CONTROL = {"<think>": OPENER, "</think>": CLOSER, "<|im_end|>": END}
RECORDED = Path(__file__).parents[3] / "shared" / "formats" / "cases.jsonl"


def phases(as_tokens: bool, thinking: bool) -> Phases:
    opener, closer = (OPENER, CLOSER) if as_tokens else (b"<think>", b"</think>")
    return Phases(
        (State(Phase.ANSWER, (Trigger(opener, 1),)), State(Phase.THINKING, (Trigger(closer, 0),))),
        start=int(thinking),
        ends=frozenset({END}),
    )


@dataclass(frozen=True)
class Feeder:
    """Reads text in a format whose markers are tokens, or ordinary text."""

    as_tokens: bool
    thinking: bool = False

    def read(self, pieces: list[bytes]) -> list[ReadEvent]:
        vocabulary = Pieces([text.encode() for text in CONTROL])
        reader = ReplyReader(Prompt((), (), phases(self.as_tokens, self.thinking)), vocabulary)
        ids = [CONTROL[p.decode()] if self.is_marker(p) else vocabulary.add(p) for p in pieces]
        return [*reader.open(), *(event for i in ids for event in reader.feed(i)), *reader.close()]

    def is_marker(self, piece: bytes) -> bool:
        return self.as_tokens and piece in {text.encode() for text in CONTROL}

    def split(self, text: str) -> Iterator[bytes]:
        """The control tokens and the runs between them."""
        import re

        for part in re.split("(" + "|".join(map(re.escape, CONTROL)) + ")", text) if self.as_tokens else [text]:
            if part:
                yield part.encode()

    def message(self, text: str) -> Message:
        return fold(self.read(list(self.split(text)))).message


TEXTS = [
    "Hello",
    "<think>\nWhy?\n</think>\n\nBecause.",
    "<think>one</think>a<think>two</think>b",
    "<think>\nnever closed, mid-wo",
    "<think>\n\n</think>\n\n    indented code",
    "  keeps its own space \n\n",
    "  \n ",
    "half 👩🏽‍🚀 astronaut é 你好",
    "a < b <thin ice </think",
    "`<think` is a tag",
]


def joined(events: list[ReadEvent]) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for event in events:
        match event:
            case PhaseOpened(phase):
                out.append(("opened", str(phase)))
            case ThinkingDelta(text) | AnswerDelta(text):
                kind = type(event).__name__
                if out and out[-1][0] == kind:
                    out[-1] = (kind, out[-1][1] + text)
                else:
                    out.append((kind, text))
    return out


@pytest.mark.parametrize("feeder", [Feeder(True), Feeder(False), Feeder(True, True), Feeder(False, True)])
@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=30, derandomize=True)
@given(data=st.data())
def test_any_cut_gives_the_same_events(feeder: Feeder, text: str, data: st.DataObject) -> None:
    whole = list(feeder.split(text))
    pieces = [p for run in whole for p in ([run] if feeder.is_marker(run) else data.draw(cuts(run)))]
    single = [p for run in whole for p in ([run] if feeder.is_marker(run) else [bytes([b]) for b in run])]
    assert joined(feeder.read(pieces)) == joined(feeder.read(whole)) == joined(feeder.read(single))


class ThoroughTracker(Tracker):
    """A tracker that takes the long way with every token."""

    def plain_text(self, token_id: int) -> None:
        return None


def observe(reader: ReplyReader, token_ids: Sequence[int]) -> list[object]:
    """Everything that a reader says after each token."""
    seen: list[object] = []
    for token_id in token_ids:
        events = [(event, getattr(event, "tokens", 0)) for event in reader.feed(token_id)]
        seen.append((events, reader.phase, reader.thinking_tokens, reader.pop_answer_tokens(), reader.held_back()))
    return [*seen, reader.close(), reader.stop]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(
    "options", [ReaderOptions(stops=("ice", "é 你")), ReaderOptions(unsplit=True, opening="<think>")]
)
@given(data=st.data())
def test_plain_text_is_read_as_any_other_token(
    as_tokens: bool, thinking: bool, options: ReaderOptions, data: st.DataObject
) -> None:
    feeder, vocabulary = Feeder(as_tokens, thinking), Pieces([text.encode() for text in CONTROL])
    runs = feeder.split(data.draw(st.sampled_from(TEXTS)))
    pieces = [p for run in runs for p in ([run] if feeder.is_marker(run) else data.draw(cuts(run)))]
    token_ids = [CONTROL[p.decode()] if feeder.is_marker(p) else vocabulary.add(p) for p in pieces]
    prompt = Prompt((), (), phases(as_tokens, thinking))
    reader = ReplyReader(prompt, vocabulary, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palaver.formats.reader.Tracker", ThoroughTracker)
        thorough = ReplyReader(prompt, vocabulary, options)
    assert reader.open() == thorough.open()
    assert observe(reader, token_ids) == observe(thorough, token_ids)


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(
    ("thinking", "text", "thought", "answer"),
    [
        (False, "<think>\nWhy?\n</think>\n\nBecause.", "Why?", "Because."),
        (True, "\nWhy?\n</think>\n\nBecause.", "Why?", "Because."),
        (True, "cut off in mid-th", "cut off in mid-th", ""),
        (False, "<think>\n\n</think>\n\n    code", "", "    code"),
        (False, "  as said \n", "", "  as said \n"),
        (False, " \n ", "", ""),
    ],
)
def test_thinking_is_thinking(as_tokens: bool, thinking: bool, text: str, thought: str, answer: str) -> None:
    message = Feeder(as_tokens, thinking).message(text)
    assert (message.thinking, message.text) == (thought, answer)


def test_the_same_letters_spelled_by_ordinary_tokens_are_text() -> None:
    events = Feeder(True).read([b"Write `", b"<th", b"ink>` to think"])
    assert fold(events).message.text == "Write `<think>` to think"


def test_a_thought_that_the_prompt_opened_is_announced_before_the_first_token() -> None:
    reader = ReplyReader(Prompt((), (), phases(True, True)), [])
    assert reader.open() == [PhaseOpened(Phase.THINKING)]


def test_a_reply_that_goes_on_is_read_from_its_start() -> None:
    vocabulary = [text.encode() for text in CONTROL] + [b"I see", b"yes"]
    reader = ReplyReader(Prompt((), (OPENER, 3, CLOSER), phases(True, False)), vocabulary)
    events = [*reader.open(), *reader.feed(4), *reader.close()]
    assert fold(events).message.thinking == "I see"
    assert fold(events).message.text == "yes"


@given(st.text(min_size=1), st.integers(0, 40))
def test_half_a_character_is_never_shown(text: str, size: int) -> None:
    shown = fold(Feeder(True).read([text.encode()[:size]])).message.text
    assert "�" not in shown or "�" in text
    assert text.startswith(shown)


@pytest.mark.parametrize("as_tokens", [True, False])
def test_recorded_replies_of_this_family(as_tokens: bool) -> None:
    """Published models' own words, where they are at hand: thinking in tags, no tools."""
    if not RECORDED.is_file():
        pytest.skip("NOTHING IS SHOWN HERE: the recorded cases are not at hand")
    cases = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    count = 0
    for case in cases:
        if not _of_this_family(case):
            continue
        count += 1
        thinking = case["generation_prompt"].rstrip().endswith("<think>")
        feeder = Feeder(as_tokens, thinking)
        expected = case["expect"][0]
        for seed in range(3):
            pieces = list(_random_cuts(feeder, case["input"], random.Random(seed)))
            message = fold(feeder.read(pieces)).message
            assert message.text.strip() == (expected.get("content") or "").strip()
            assert message.thinking.strip() == (expected.get("reasoning_content") or "").strip()
    assert count > 10


def _of_this_family(case: dict[str, object]) -> bool:
    expected = case["expect"]
    assert isinstance(expected, list)
    return (
        case.get("thinking_start_tag") == "<think>"
        and case.get("continue") == 0
        and case["reasoning_format"] != "none"
        and not case.get("json_schema")
        and len(expected) == 1
        and not expected[0].get("tool_calls")
        and case.get("format") == "peg-native"
    )


def _random_cuts(feeder: Feeder, text: str, rng: random.Random) -> Iterator[bytes]:
    for run in feeder.split(text):
        if feeder.is_marker(run):
            yield run
            continue
        while run:
            size = rng.randint(1, 6)
            yield run[:size]
            run = run[size:]


def answer_tokens(pieces: list[str], stops: tuple[str, ...] = ()) -> list[str]:
    """The tokens that a reader finds in the answer."""
    vocabulary = Pieces([text.encode() for text in CONTROL])
    hidden = vocabulary.add(b"<|hidden|>")
    states = replace(phases(True, False), hidden=frozenset({hidden}))
    reader = ReplyReader(Prompt((), (), states), vocabulary, ReaderOptions(stops=stops))
    ids = [CONTROL[piece] if piece in CONTROL else vocabulary.add(piece.encode()) for piece in pieces]
    found = []
    for token_id in ids:
        reader.feed(token_id)
        found += reader.pop_answer_tokens()
    reader.close()
    return [pieces[position] for position in [*found, *reader.pop_answer_tokens()]]


@pytest.mark.parametrize(
    ("pieces", "stops", "answer"),
    [
        (["<think>", "a", "</think>", "\n\n", "b", " ", "c", "<|im_end|>"], (), ["b", " ", "c"]),
        (["a", "S", "TO", "P", "x"], ("STOP",), ["a"]),
        (["a", "ST", "b"], ("STOP",), ["a", "ST", "b"]),
        (["a", "ST"], ("STOP",), ["a", "ST"]),
        (["a", "bST", "OP"], ("STOP",), ["a", "bST"]),
        (["a", "<think>", "b", "</think>", "c"], (), ["a", "c"]),
        (["a", "<|hidden|>", "b", "c"], (), ["a", "b", "c"]),
    ],
)
def test_the_reader_finds_the_tokens_of_the_answer(
    pieces: list[str], stops: tuple[str, ...], answer: list[str]
) -> None:
    assert answer_tokens(pieces, stops) == answer


@pytest.mark.parametrize("name", FAMILIES)
def test_held_back_text_is_that_of_the_end(name: str) -> None:
    format, pieces = make_format(FAMILIES[name])
    for case in FAMILIES[name].replies:
        prompt = format.render((user("q"),), TOOLS)
        reader = format.reader(prompt, (), TOOLS)
        reader.open()
        held = reader.held_back()
        for token_id in ids(pieces, case.text):
            reader.feed(token_id)
            held = reader.held_back()
        assert held == reader.close(), case.text
