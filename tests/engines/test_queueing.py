"""The queue: fair between owners, in order within each of them, and honest about positions."""

from collections.abc import Iterator
from itertools import count, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.core.generation import TorchGeneration
from palaver.engines.core.queue import TOLD_AT_ONCE, RequestQueue
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.request import BLOCK, LogitsProcessor, SequenceState
from palaver.errors import QueueFull
from palaver.generation import Prompt, Queued
from palaver.sampling import Sampling
from tests.engines.tiny import SIZE, VOCABULARY

SAMPLING = Sampling()


def sequence(owner: str = "", tokens: tuple[int, ...] = (1,)) -> SequenceState:
    prompt = Prompt(tokens, owner=owner)
    reply = ReplyState(prompt, SAMPLING, VOCABULARY)
    return SequenceState(
        TorchGeneration(prompt, SAMPLING, 0, lambda command: None), LogitsProcessor(prompt, SAMPLING, 0, reply, SIZE)
    )


def add(waiting: RequestQueue, owner: str) -> SequenceState:
    added = sequence(owner)
    waiting.add(added)
    return added


def admit(waiting: RequestQueue) -> SequenceState:
    first = waiting.sequences[0]
    waiting.admit(first.generation)
    return first


def positions(waiting: RequestQueue) -> dict[SequenceState, int]:
    return {queued: position for position, queued in enumerate(waiting.sequences, 1)}


def test_owners_are_served_in_turn() -> None:
    waiting = RequestQueue(100)
    greedy = [add(waiting, "greedy") for _ in range(5)]
    modest = [add(waiting, "modest") for _ in range(2)]
    late = add(waiting, "late")
    assert waiting.sequences == [greedy[0], modest[0], late, greedy[1], modest[1], *greedy[2:]]
    admit(waiting)
    admit(waiting)
    again = add(waiting, "another")
    assert waiting.sequences == [late, greedy[1], modest[1], again, *greedy[2:]]


def test_one_owner_leaves_places_for_others() -> None:
    waiting = RequestQueue(16)
    push(waiting, repeat("greedy"))
    assert len(waiting) == 8
    push(waiting, repeat("as greedy"))
    assert len(waiting) == 12
    for number in range(4):
        add(waiting, f"somebody {number}")
    with pytest.raises(QueueFull):
        add(waiting, "too late")
    admit(waiting)
    for owner in ("greedy", "as greedy", "somebody 0"):
        with pytest.raises(QueueFull):
            add(waiting, owner)
    add(waiting, "the next one")


Action = tuple[str, int]
actions = st.lists(
    st.tuples(st.sampled_from(["join", "join", "join", "admit", "cancel", "preempt"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions)
def test_order_and_positions(steps: list[Action]) -> None:
    """Per owner first come, first served; a position only grows when somebody else joins, and then by one."""
    waiting = RequestQueue(1000)
    running: list[SequenceState] = []
    preempted: set[SequenceState] = set()
    arrivals: dict[SequenceState, int] = {}
    numbers = count()
    for kind, which in steps:
        before = positions(waiting)
        joined = None
        match kind:
            case "join":
                joined = add(waiting, f"owner {which % 4}")
                arrivals[joined] = next(numbers)
            case "admit" if before:
                running.append(admit(waiting))
                assert before[running[-1]] == 1
            case "cancel" if before:
                gone = waiting.sequences[which % len(before)]
                assert waiting.remove(gone.generation)
                assert waiting.find(gone.generation) is None
                assert not waiting.remove(gone.generation)
            case "preempt" if running:
                joined = running.pop()
                preempted.add(joined)
                waiting.put_back(joined)
                assert positions(waiting)[joined] == 1
        after = positions(waiting)
        assert list(after.values()) == list(range(1, len(waiting) + 1))
        for queued in before.keys() & after.keys():
            others = joined is not None and joined is not queued and (joined.owner != queued.owner or kind == "preempt")
            assert after[queued] <= before[queued] + others
        for owner in {queued.owner for queued in after}:
            line = [arrivals[queued] for queued in after if queued.owner == owner and queued not in preempted]
            assert line == sorted(line)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 5), st.integers(8, 40))
def test_nobody_starves(before: list[int], nth: int, places: int) -> None:
    """However many new owners push in, the nth request of an owner is let in within n rounds of the whole queue."""
    waiting = RequestQueue(2 * places)
    names = (f"pushing {number}" for number in count())
    for owner in before[: places - nth]:
        add(waiting, f"owner {owner}")
    mine = [add(waiting, "me") for _ in range(nth)]
    push(waiting, names)
    for _ in range(nth * 2 * places):
        if admit(waiting) is mine[-1]:
            return
        push(waiting, names)
    pytest.fail("it still waits")


def push(waiting: RequestQueue, names: Iterator[str]) -> None:
    """Requests of these owners take every place they can."""
    while True:
        try:
            add(waiting, next(names))
        except QueueFull:
            return


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_owners_who_always_wait_are_let_in_equally_often(depths: list[int]) -> None:
    waiting = RequestQueue(1000)
    owners = [f"owner {number}" for number in range(len(depths))]
    for owner, depth in zip(owners, depths, strict=True):
        for _ in range(depth):
            add(waiting, owner)
    served = []
    for _ in range(20 * len(owners)):
        served.append(admit(waiting).owner)
        add(waiting, served[-1])
    counts = [served.count(owner) for owner in owners]
    assert max(counts) - min(counts) <= 1


def test_positions_are_told_when_they_change_and_few_at_a_time() -> None:
    waiting = RequestQueue(1000)
    queued = [add(waiting, f"owner {number}") for number in range(3 * TOLD_AT_ONCE)]
    told: dict[TorchGeneration, Queued] = {}
    for _ in range(3):
        news = dict(waiting.news())
        assert len(news) == TOLD_AT_ONCE
        told |= news
    assert [told[one.generation] for one in queued] == [Queued(i + 1) for i in range(len(queued))]
    assert not dict(waiting.news())
    waiting.remove(queued[5].generation)
    told = {generation: queued for _ in range(3) for generation, queued in waiting.news()}
    assert told == {one.generation: Queued(i) for i, one in enumerate(queued[6:], 6)}


def test_estimates_are_of_the_queue_as_it_moves_now() -> None:
    now = 0.0
    waiting = RequestQueue(100, clock=lambda: now)

    def end_one_each(seconds: float) -> None:
        nonlocal now
        for _ in range(3):
            waiting.note_end()
            now += seconds

    end_one_each(3600)  # nobody waited, so this tells nothing
    add(waiting, "first")
    assert [queued for _, queued in waiting.news()] == [Queued(1, None)]
    end_one_each(2)
    add(waiting, "second")
    assert [queued for _, queued in waiting.news()] == [Queued(2, 4.0)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 250), st.lists(st.integers(0, 1), max_size=150))
def test_common_beginnings_are_counted_to_the_token(one: list[int], cut: int, tail: list[int]) -> None:
    long = (one * 3)[: 3 * BLOCK]
    a, b = (7, *long), (7, *long[:cut], *tail)
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert sequence(tokens=a).common(sequence(tokens=b)) == expected
