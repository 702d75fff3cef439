"""The parts of a choice that no whole server shows in every run."""

from __future__ import annotations

from typing import Any

import pytest

from palaver.events import AnswerDelta, ReadEvent, ThinkingDelta, ToolCallDelta
from palaver.server.openai.choices import SeamTrimmer


@pytest.mark.parametrize(
    ("sent", "events", "new"),
    [
        ({}, [AnswerDelta(" a")], [AnswerDelta(" a")]),
        ({AnswerDelta: " "}, [AnswerDelta(" a")], [AnswerDelta("a")]),
        ({AnswerDelta: " a"}, [AnswerDelta(" "), AnswerDelta("a b")], [AnswerDelta(" b")]),
        ({ThinkingDelta: "\n"}, [AnswerDelta("x")], [AnswerDelta("x")]),
        ({ThinkingDelta: "\n"}, [ThinkingDelta("\nmore")], [ThinkingDelta("more")]),
        ({ToolCallDelta: '{"a'}, [ToolCallDelta(0, '{"ab"')], [ToolCallDelta(0, 'b"')]),
        ({AnswerDelta: "zzz"}, [AnswerDelta("other")], [AnswerDelta("other")]),
    ],
)
def test_text_that_the_client_has_is_not_sent_again(sent: Any, events: list[ReadEvent], new: list[ReadEvent]) -> None:
    trimmer = SeamTrimmer(sent)
    assert [new_event for event in events if (new_event := trimmer.trim(event)) is not None] == new
