import pytest

from palaver.engines.core.reply_state import ReplyState
from palaver.generation import Ended, Finish, Prompt
from palaver.phases import Phase, Phases, State, Trigger
from palaver.sampling import Sampling
from tests.engines.tiny import END, THINK, THINK_END, VOCABULARY

NEWLINE = ord("\n")
THINKING = Phases(
    states=(
        State(Phase.ANSWER, (Trigger(THINK, 1),)),
        State(Phase.THINKING, (Trigger(THINK_END, 0),), closing=(NEWLINE, THINK_END, NEWLINE)),
    ),
    ends=frozenset({END}),
)


def reply(
    said: bytes | tuple[int, ...] = b"", phases: Phases = THINKING, limit: int = 100, **sampling: object
) -> ReplyState:
    prompt = Prompt((1, 2), tuple(said), phases)
    return ReplyState(prompt, Sampling(**sampling), VOCABULARY, frozenset({END}), limit)  # type: ignore[arg-type]


def finish(it: ReplyState) -> Finish | None:
    return it.ended.finish if it.ended else None


def test_ends_at_end_ids_stop_ids_and_lengths() -> None:
    assert finish(reply((65, END))) is Finish.END
    assert finish(reply((65, 66), stop_ids=(66,))) is Finish.END
    assert finish(reply(b"abc", max_tokens=3)) is Finish.LENGTH
    assert finish(reply(b"abc", limit=5)) is Finish.LENGTH
    assert reply(b"abc", max_tokens=4).ended is None


def test_a_stop_string_counts_in_the_answer_only_and_is_told() -> None:
    assert reply((THINK, *b"stop", THINK_END), stop=("stop",)).ended is None
    assert reply(b"say stop", stop=("stop", "x")).ended == Ended(Finish.STOP_STRING, "stop")


def test_a_trigger_goes_before_the_ends_of_the_turn() -> None:
    phases = Phases((State(Phase.CONTROL, (Trigger(END, 1),)), State(Phase.ANSWER)), ends=frozenset({END}))
    it = reply((), phases)
    assert END not in it.closers
    it.take(END)
    assert it.ended is None
    assert END in it.closers
    it.take(END)
    assert finish(it) is Finish.END


def test_a_trigger_that_leads_to_the_end_is_a_closer() -> None:
    phases = Phases((State(Phase.ANSWER, (Trigger(65, 1),)), State(Phase.END)))
    it = reply((), phases)
    assert 65 in it.closers
    it.take(65)
    assert finish(it) is Finish.END


@pytest.mark.parametrize("cut", range(9))
def test_a_spent_budget_forces_the_closing_wherever_the_reply_is_cut(cut: int) -> None:
    said: list[int] = []
    whole = reply((), thinking_budget=3)
    for natural in (THINK, *b"abcdefgh"):
        it = reply(tuple(said), thinking_budget=3) if len(said) == cut else whole
        assert it.forced == whole.forced
        token_id = natural if whole.forced is None else whole.forced
        whole.take(token_id)
        said.append(token_id)
    assert said[:7] == [THINK, *b"abc", NEWLINE, THINK_END, NEWLINE]


def test_a_budget_of_nothing_closes_at_once_and_a_smaller_one_later_still_closes() -> None:
    assert reply((THINK,), thinking_budget=0).forced == NEWLINE
    assert reply((THINK, *b"long thoughts"), thinking_budget=2).forced == NEWLINE


def test_answer_now_closes_an_open_thought_only() -> None:
    it = reply((THINK, 65))
    assert it.forced is None
    it.answer_now()
    for expected in (NEWLINE, THINK_END, NEWLINE):
        assert it.forced == expected
        it.take(expected)
    assert it.forced is None
    answering = reply(b"hello")
    answering.answer_now()
    assert answering.forced is None


def test_nothing_changes_after_the_end() -> None:
    it = reply((65, END, 66))
    assert it.ids == [65, END]
