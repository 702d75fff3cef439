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
    reply_ids: bytes | tuple[int, ...] = b"", phases: Phases = THINKING, limit: int = 100, **sampling: object
) -> ReplyState:
    prompt = Prompt((1, 2), tuple(reply_ids), phases)
    return ReplyState(prompt, Sampling(**sampling), VOCABULARY, frozenset({END}), limit)  # type: ignore[arg-type]


def finish(state: ReplyState) -> Finish | None:
    return state.ended.finish if state.ended else None


def test_ends_at_end_ids_stop_ids_and_lengths() -> None:
    assert finish(reply((65, END))) is Finish.END
    assert finish(reply((65, 66), stop_ids=(66,))) is Finish.END
    assert finish(reply(b"abc", max_tokens=3)) is Finish.LENGTH
    assert finish(reply(b"abc", limit=5)) is Finish.LENGTH
    assert reply(b"abc", max_tokens=4).ended is None


def test_a_stop_string_counts_in_the_answer_only_and_is_reported() -> None:
    assert reply((THINK, *b"stop", THINK_END), stop=("stop",)).ended is None
    assert reply(b"say stop", stop=("stop", "x")).ended == Ended(Finish.STOP_STRING, "stop")


def test_a_trigger_goes_before_the_ends_of_the_turn() -> None:
    phases = Phases((State(Phase.CONTROL, (Trigger(END, 1),)), State(Phase.ANSWER)), ends=frozenset({END}))
    state = reply((), phases)
    assert END not in state.stop_token_ids
    state.append_token(END)
    assert state.ended is None
    assert END in state.stop_token_ids
    state.append_token(END)
    assert finish(state) is Finish.END


def test_a_trigger_that_leads_to_the_end_is_a_stop_token() -> None:
    phases = Phases((State(Phase.ANSWER, (Trigger(65, 1),)), State(Phase.END)))
    state = reply((), phases)
    assert 65 in state.stop_token_ids
    state.append_token(65)
    assert finish(state) is Finish.END


@pytest.mark.parametrize("cut", range(9))
def test_a_spent_budget_forces_the_closing_wherever_the_reply_is_cut(cut: int) -> None:
    reply_ids: list[int] = []
    uncut = reply((), thinking_budget=3)
    for natural in (THINK, *b"abcdefgh"):
        state = reply(tuple(reply_ids), thinking_budget=3) if len(reply_ids) == cut else uncut
        assert state.forced_id == uncut.forced_id
        token_id = natural if uncut.forced_id is None else uncut.forced_id
        uncut.append_token(token_id)
        reply_ids.append(token_id)
    assert reply_ids[:7] == [THINK, *b"abc", NEWLINE, THINK_END, NEWLINE]


def test_a_budget_of_nothing_closes_at_once_and_a_smaller_one_later_still_closes() -> None:
    assert reply((THINK,), thinking_budget=0).forced_id == NEWLINE
    assert reply((THINK, *b"long thoughts"), thinking_budget=2).forced_id == NEWLINE


def test_answer_now_closes_an_open_thought_only() -> None:
    state = reply((THINK, 65))
    assert state.forced_id is None
    state.answer_now()
    for expected in (NEWLINE, THINK_END, NEWLINE):
        assert state.forced_id == expected
        state.append_token(expected)
    assert state.forced_id is None
    answering = reply(b"hello")
    answering.answer_now()
    assert answering.forced_id is None


def test_nothing_changes_after_the_end() -> None:
    state = reply((65, END, 66))
    assert state.token_ids == [65, END]
