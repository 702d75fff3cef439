"""The line after a turn."""

from __future__ import annotations

import pytest

from palaver.events import Failed, Finished, Usage
from palaver.generation import Finish
from palaver.repl.status import statistics_line
from palaver.sampling import Sampling
from palaver.store import ReplySettings, ReplyStatus, StoredReply

USAGE = Usage(20, 15, 31, 10)


def record(usage: Usage, **timings: float) -> StoredReply:
    return StoredReply(ReplyStatus.DONE, ReplySettings("m", Sampling()), usage, timings)


def test_a_whole_reply() -> None:
    after = record(USAGE, seconds=2.0, first_token=0.5)
    expected = statistics_line(Finished(Finish.END, USAGE), 0.6, None, after)
    assert expected == "31 tokens (10 thinking) · 20 tokens/s · first 0.6 s · prompt 20 (15 cached)"
    assert statistics_line(Finished(Finish.END, Usage(1_200, 0, 1, 0))) == "1 token · prompt 1,200"


def test_a_narrow_terminal_shows_fewer_numbers() -> None:
    after = record(USAGE, seconds=2.0, first_token=0.5)
    whole = statistics_line(Finished(Finish.END, USAGE), 0.6, None, after)
    for width in range(20, 90):
        line = statistics_line(Finished(Finish.STOPPED, USAGE), 0.6, None, after, width).splitlines()[0]
        assert whole.startswith(line)
        assert len(line) <= max(width, len("31 tokens (10 thinking)"))
    line = statistics_line(Finished(Finish.END, USAGE), 0.6, None, after, 60)
    assert line == "31 tokens (10 thinking) · 20 tokens/s · first 0.6 s"


def test_of_a_reply_that_went_on_the_new_part_is_measured() -> None:
    before = record(Usage(20, 0, 20, 10), seconds=10.0, first_token=0.5)
    after = record(USAGE, seconds=13.0, first_token=0.5)
    assert "· 5.0 tokens/s ·" in statistics_line(Finished(Finish.END, USAGE), 1.0, before, after)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Finished(Finish.STOPPED, USAGE), "\nStopped. /continue picks up where it left off."),
        (Finished(Finish.LENGTH, USAGE), "\nReached the length limit. /continue picks up where it left off."),
        (Finished(Finish.STOP_STRING, USAGE, stop="END"), '\nEnded at the stop string "END".'),
        (Failed("The engine died."), "Failed: The engine died."),
    ],
)
def test_endings_that_are_worth_telling(ending: Finished | Failed, expected: str) -> None:
    assert statistics_line(ending).endswith(expected)
