"""ReplyView: thinking, answers, tool calls, notices and endings on the screen."""

from __future__ import annotations

import random

from palaver.chat.turn_log import LogEntry
from palaver.events import (
    AnswerDelta,
    DraftBlock,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Usage,
    Waiting,
)
from palaver.generation import Finish
from palaver.messages import assistant
from palaver.phases import Phase
from palaver.repl.settings import ThinkingDisplay
from tests.repl.emulator import TerminalEmulator, log_entries, make_view

THINKING, ANSWER = PhaseOpened(Phase.THINKING), PhaseOpened(Phase.ANSWER)
USAGE = Usage(20, 15, 30, 10)
END = Finished(Finish.END, USAGE)
REPLY: list[Event] = [
    Started(20, 15),
    THINKING,
    *(ThinkingDelta(f"step {n}\n") for n in range(10)),
    ANSWER,
    AnswerDelta("The **answer"),
    AnswerDelta("** is 42."),
    END,
]


def render(
    events: list[Event],
    thinking_display: ThinkingDisplay = ThinkingDisplay.COLLAPSED,
    last_event: int = 0,
    columns: int = 80,
) -> str:
    emulator = TerminalEmulator(columns)
    view, _ = make_view(emulator, thinking_display, last_event)
    for entry in log_entries(*events):
        view.handle(entry)
        view.paint()
    return emulator.shown()


def test_a_thought_is_one_line_when_it_is_over() -> None:
    assert render(REPLY) == "Thought for 0.0 s\n\nThe answer is 42."


def test_a_thought_in_full() -> None:
    shown = render(REPLY, ThinkingDisplay.EXPANDED)
    assert "\n".join(f"│ step {n}" for n in range(10)) in shown
    assert "Thought for" in shown


def test_a_hidden_thought() -> None:
    shown = render(REPLY, ThinkingDisplay.HIDDEN)
    assert "step" not in shown
    assert "Thought for" not in shown
    assert shown.startswith("The answer")


def test_while_it_thinks_the_last_lines_are_live() -> None:
    emulator = TerminalEmulator()
    view, clock = make_view(emulator)
    for entry in log_entries(*REPLY[:12]):
        view.handle(entry)
    clock.now = 3.2
    view.paint()
    assert emulator.shown() == "Thinking · 3.2 s\n" + "\n".join(f"│ step {n}" for n in range(4, 10))


def test_the_time_of_a_thought_is_without_the_prefill() -> None:
    emulator = TerminalEmulator()
    view, clock = make_view(emulator)
    entries = log_entries(THINKING, Started(9, 0), ThinkingDelta("hm"), ANSWER, AnswerDelta("yes"), END)
    view.handle(entries[0])
    view.paint()
    assert emulator.shown() == "Thinking", "the prompt opens the thought: it is shown before anything was computed"
    clock.now = 10.0
    view.paint()
    assert emulator.shown() == "Thinking\nReading · 10.0 s"
    view.handle(entries[1])
    clock.now = 11.5
    for entry in entries[2:]:
        view.handle(entry)
    assert emulator.shown().startswith("Thought for 1.5 s")
    assert view.time_to_first_token == 11.5


def continued(thinking_seconds: float | None) -> str:
    """A reply that was stopped in its thought, shown from there on; the rest of the thought takes 2 s."""
    started = Started(9, 9, thinking_seconds=thinking_seconds)
    emulator = TerminalEmulator()
    view, clock = make_view(emulator, last_event=2)
    entries = log_entries(THINKING, ThinkingDelta("hm", 1), started, ThinkingDelta("so", 2), ANSWER, END)
    for entry in entries[:3]:
        view.handle(entry)
    clock.now = 2.0
    for entry in entries[3:]:
        view.handle(entry)
    return emulator.shown()


def test_the_time_of_a_continued_thought_is_that_of_all_its_parts() -> None:
    assert continued(5.0).startswith("Thought for 7.0 s · 2 tokens")
    assert continued(None).startswith("Thought · 2 tokens"), "not known: no time rather than a wrong one"


def test_the_time_of_a_thought_leaves_out_the_time_without_a_server() -> None:
    emulator = TerminalEmulator()
    view, clock = make_view(emulator)
    before = log_entries(THINKING, Started(9, 0), ThinkingDelta("hm", 1))
    after = log_entries(THINKING, ThinkingDelta("hm", 1), Started(9, 9, thinking_seconds=3.0), ThinkingDelta("so", 2))
    for entry in before:
        view.handle(entry)
    clock.now = 60.0  # the server was away from 3 s on
    for entry in [*after[2:], LogEntry(4, ANSWER)]:
        clock.now += 1.0
        view.handle(entry)
    view.handle(LogEntry(4, END))
    assert emulator.shown().startswith("Thought for 5.0 s · 2 tokens")


def test_a_thought_that_was_begun_elsewhere_is_timed_from_its_start() -> None:
    emulator = TerminalEmulator()
    view, clock = make_view(emulator)
    entries = log_entries(THINKING, Started(9, 0, thinking_seconds=8.0), ThinkingDelta("hm", 1), ANSWER, END)
    for entry in entries[:3]:
        view.handle(entry)
    clock.now = 1.5
    for entry in entries[3:]:
        view.handle(entry)
    assert emulator.shown().startswith("Thought for 9.5 s · 1 token")


def test_toggling_while_it_thinks() -> None:
    emulator = TerminalEmulator()
    view, _ = make_view(emulator)
    entries = log_entries(*REPLY)
    for entry in entries[:7]:
        view.handle(entry)
    view.paint()
    view.toggle()
    for entry in entries[7:]:
        view.handle(entry)
        view.paint()
    shown = emulator.shown()
    assert [shown.count(f"│ step {n}\n") for n in range(10)] == [1] * 10


def test_tool_calls_are_shown_as_calls() -> None:
    shown = render(
        [
            Started(9, 0),
            PhaseOpened(Phase.TOOL_CALL),
            ToolCallOpened(0, "c1", "weather"),
            ToolCallDelta(0, '{"city": '),
            ToolCallDelta(0, '"Oslo", "days": 2}'),
            ToolCallOpened(1, "c2", "broken"),
            ToolCallDelta(1, '{"cut'),
            END,
        ]
    )
    assert 'calls weather(city="Oslo", days=2)' in shown
    assert 'calls broken {"cut' in shown


def test_notices_waiting_and_failing() -> None:
    emulator = TerminalEmulator()
    view, clock = make_view(emulator)
    entries = log_entries(
        Waiting(2, 5.0), Started(3, 0), AnswerDelta("half"), Notice("Careful."), Failed("The engine died.")
    )
    view.handle(entries[0])
    clock.now = 1.0
    view.paint()
    assert emulator.shown() == "Waiting in line: number 2, about 5.0 s · 1.0 s"
    for entry in entries[1:]:
        view.handle(entry)
    assert emulator.shown() == "Careful.\nhalf"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    ending = Finished(Finish.STOPPED, USAGE, tail=(AnswerDelta(" <thi"),))
    assert "It is <thi" in render([Started(1, 0), AnswerDelta("It is"), ending])


def test_what_was_seen_before_is_not_shown_again_but_for_the_open_block() -> None:
    """A reply that is continued inside a code block is rendered as code."""
    before: list[Event] = [
        THINKING,
        ThinkingDelta("hm"),
        ANSWER,
        AnswerDelta("First.\n\n```py\nx = 1\ny ="),
    ]
    shown = render([*before, Started(9, 9), AnswerDelta(" 2\nz = 3\n```\nDone."), END], last_event=4)
    assert "First" not in shown
    assert "x = 1" not in shown
    assert "Thought" not in shown
    assert shown.startswith("y = 2\nz = 3\n───\n\nDone.")


def test_a_snapshot_stands_for_what_was_said() -> None:
    assert render([Snapshot(assistant("Said.", "Thought.")), END]).startswith("Thought\n\nSaid.")


def test_nothing_above_the_live_lines_is_touched() -> None:
    """Holds for any reply and any split into deltas."""
    text = (
        "Some words. " * 30
        + "\n\n- a\n- b\n\n```py\n"
        + "x = 1\n" * 30
        + "```\n\n| a | b |\n|--|--|\n"
        + "| 1 | 2 |\n" * 9
    )
    for seed in range(8):
        rng = random.Random(seed)
        emulator = TerminalEmulator(40)
        view, _ = make_view(emulator, rng.choice(list(ThinkingDisplay)))
        view._screen.show("above")
        at, settled = 0, 0
        view.handle(log_entries(Started(1, 0))[0])
        while at < len(text):
            step = rng.randint(1, 30)
            delta = AnswerDelta(text[at : at + step]) if at > 200 else ThinkingDelta(text[at : at + step])
            view.handle(log_entries(delta)[0])
            at += step
            emulator.first_touched_row()
            view.paint()
            touched = emulator.first_touched_row()
            assert touched is None or touched >= settled
            settled = emulator.screen.cursor.y + 1 - max(1, len(view._screen._live))
        view.handle(log_entries(END)[0])
        assert emulator.shown().startswith("above")


def test_a_draft_is_painted_in_place_until_its_text_is_there() -> None:
    emulator = TerminalEmulator(80)
    view, _ = make_view(emulator, ThinkingDisplay.COLLAPSED)
    drafts = [
        DraftBlock(0, (None, None, None), (0.1, 0.5, 0.9)),
        DraftBlock(0, ("Hello", None, "\x1b[2J!"), (1.0, 0.5, 0.9)),
    ]
    shown = []
    events: list[Event] = [Started(20, 15), ANSWER, *drafts, AnswerDelta("Hello there!"), END]
    for event in events:
        view.handle(LogEntry(1, event))
        view.paint()
        shown.append(emulator.shown())
    assert shown[2] == "░▒▓"
    assert shown[3].startswith("Hello▒")
    assert shown[3].endswith("!")
    assert shown[-1] == "Hello there!"


def test_a_stop_shows_the_unfinished_block() -> None:
    draft = DraftBlock(2, ("there", None), (1.0, 0.2))
    stopped = Finished(Finish.STOPPED, USAGE)
    shown = render([Started(20, 15), ANSWER, AnswerDelta("Hello "), draft, stopped])
    assert shown.startswith("Hello")
    assert shown.endswith("there░")
    assert "there" not in render([Started(20, 15), ANSWER, AnswerDelta("Hello "), draft, END])
    hidden = render([Started(20, 15), THINKING, draft, stopped], ThinkingDisplay.HIDDEN)
    assert "there" not in hidden
