"""The queue: fair between owners, in order within each of them, and honest about positions."""

from collections.abc import Iterator
from itertools import count, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.request import BLOCK_SIZE, MAX_POSITION_UPDATES, RequestQueue, SequenceState
from palaver.errors import QueueFull
from palaver.generation import Prompt, Queued
from palaver.sampling import Sampling
from tests.engines.tiny import SIZE, VOCABULARY

SAMPLING = Sampling()


def sequence(owner: str = "", tokens: tuple[int, ...] = (1,)) -> SequenceState:
    prompt = Prompt(tokens, owner=owner)
    reply = ReplyState(prompt, SAMPLING, VOCABULARY)
    return SequenceState(
        LocalGeneration(prompt, SAMPLING, 0, lambda command: None), LogitsProcessor(prompt, SAMPLING, 0, reply, SIZE)
    )


def add(queue: RequestQueue[SequenceState], owner: str) -> SequenceState:
    added = sequence(owner)
    queue.add(added)
    return added


def admit(queue: RequestQueue[SequenceState]) -> SequenceState:
    first = queue.sequences[0]
    queue.admit(first.generation)
    return first


def positions(queue: RequestQueue[SequenceState]) -> dict[SequenceState, int]:
    return {queued: position for position, queued in enumerate(queue.sequences, 1)}


def test_owners_are_served_in_turn() -> None:
    queue = RequestQueue[SequenceState](100)
    greedy = [add(queue, "greedy") for _ in range(5)]
    modest = [add(queue, "modest") for _ in range(2)]
    late = add(queue, "late")
    assert queue.sequences == [greedy[0], modest[0], late, greedy[1], modest[1], *greedy[2:]]
    admit(queue)
    admit(queue)
    again = add(queue, "another")
    assert queue.sequences == [late, greedy[1], modest[1], again, *greedy[2:]]


def test_one_owner_leaves_places_for_others() -> None:
    queue = RequestQueue[SequenceState](16)
    push(queue, repeat("greedy"))
    assert len(queue) == 8
    push(queue, repeat("as greedy"))
    assert len(queue) == 12
    for number in range(4):
        add(queue, f"somebody {number}")
    with pytest.raises(QueueFull):
        add(queue, "too late")
    admit(queue)
    for owner in ("greedy", "as greedy", "somebody 0"):
        with pytest.raises(QueueFull):
            add(queue, owner)
    add(queue, "the next one")


Action = tuple[str, int]
actions = st.lists(
    st.tuples(st.sampled_from(["join", "join", "join", "admit", "cancel", "preempt"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions)
def test_order_and_positions(steps: list[Action]) -> None:
    """Per owner first come, first served; a position only grows when another request joins, and then by one."""
    queue = RequestQueue[SequenceState](1000)
    running: list[SequenceState] = []
    preempted: set[SequenceState] = set()
    arrivals: dict[SequenceState, int] = {}
    numbers = count()
    for kind, which in steps:
        before = positions(queue)
        joined = None
        match kind:
            case "join":
                joined = add(queue, f"owner {which % 4}")
                arrivals[joined] = next(numbers)
            case "admit" if before:
                running.append(admit(queue))
                assert before[running[-1]] == 1
            case "cancel" if before:
                gone = queue.sequences[which % len(before)]
                assert queue.remove(gone.generation)
                assert queue.find(gone.generation) is None
                assert not queue.remove(gone.generation)
            case "preempt" if running:
                joined = running.pop()
                preempted.add(joined)
                queue.requeue(joined)
                assert positions(queue)[joined] == 1
        after = positions(queue)
        assert list(after.values()) == list(range(1, len(queue) + 1))
        for queued in before.keys() & after.keys():
            others = joined is not None and joined is not queued and (joined.owner != queued.owner or kind == "preempt")
            assert after[queued] <= before[queued] + others
        for owner in {queued.owner for queued in after}:
            line = [arrivals[queued] for queued in after if queued.owner == owner and queued not in preempted]
            assert line == sorted(line)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 5), st.integers(8, 40))
def test_no_request_starves(before: list[int], nth: int, places: int) -> None:
    """However many new owners push in, the nth request of an owner is let in within n rounds of the whole queue."""
    queue = RequestQueue[SequenceState](2 * places)
    names = (f"pushing {number}" for number in count())
    for owner in before[: places - nth]:
        add(queue, f"owner {owner}")
    mine = [add(queue, "me") for _ in range(nth)]
    push(queue, names)
    for _ in range(nth * 2 * places):
        if admit(queue) is mine[-1]:
            return
        push(queue, names)
    pytest.fail("it still waits")


def push(queue: RequestQueue[SequenceState], names: Iterator[str]) -> None:
    """Requests of these owners take every place they can."""
    while True:
        try:
            add(queue, next(names))
        except QueueFull:
            return


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_owners_who_always_wait_are_let_in_equally_often(depths: list[int]) -> None:
    queue = RequestQueue[SequenceState](1000)
    owners = [f"owner {number}" for number in range(len(depths))]
    for owner, depth in zip(owners, depths, strict=True):
        for _ in range(depth):
            add(queue, owner)
    served = []
    for _ in range(20 * len(owners)):
        served.append(admit(queue).owner)
        add(queue, served[-1])
    counts = [served.count(owner) for owner in owners]
    assert max(counts) - min(counts) <= 1


def test_positions_are_reported_when_they_change_and_few_at_a_time() -> None:
    queue = RequestQueue[SequenceState](1000)
    queued = [add(queue, f"owner {number}") for number in range(3 * MAX_POSITION_UPDATES)]
    reported: dict[LocalGeneration, Queued] = {}
    for _ in range(3):
        updates = dict(queue.position_updates())
        assert len(updates) == MAX_POSITION_UPDATES
        reported |= updates
    assert [reported[one.generation] for one in queued] == [Queued(i + 1) for i in range(len(queued))]
    assert not dict(queue.position_updates())
    queue.remove(queued[5].generation)
    reported = {generation: queued for _ in range(3) for generation, queued in queue.position_updates()}
    assert reported == {one.generation: Queued(i) for i, one in enumerate(queued[6:], 6)}


def test_estimates_are_of_the_queue_as_it_moves_now() -> None:
    now = 0.0
    queue = RequestQueue[SequenceState](100, clock=lambda: now)

    def end_one_each(seconds: float) -> None:
        nonlocal now
        for _ in range(3):
            queue.record_finish()
            now += seconds

    end_one_each(3600)  # no request waited, so this predicts nothing
    add(queue, "first")
    assert [queued for _, queued in queue.position_updates()] == [Queued(1, None)]
    end_one_each(2)
    add(queue, "second")
    assert [queued for _, queued in queue.position_updates()] == [Queued(2, 4.0)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 250), st.lists(st.integers(0, 1), max_size=150))
def test_common_beginnings_are_counted_to_the_token(one: list[int], cut: int, tail: list[int]) -> None:
    long = (one * 3)[: 3 * BLOCK_SIZE]
    a, b = (7, *long), (7, *long[:cut], *tail)
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert sequence(tokens=a).common_prefix(sequence(tokens=b)) == expected
