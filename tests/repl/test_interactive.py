"""The prompt: its keys, read from a pipe."""

from __future__ import annotations

from prompt_toolkit.completion import DummyCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input, create_pipe_input
from prompt_toolkit.output import DummyOutput

from palaver.repl.input import LastMessage, TypedLine
from palaver.repl.interactive import PromptLine
from palaver.repl.terminal_mode import KeyMode
from tests.repl.terminal import ENTER, UP


def open_prompt(input: Input) -> PromptLine:
    mode = KeyMode(input.fileno())
    return PromptLine(
        input, DummyOutput(), mode, InMemoryHistory(), DummyCompleter(), lambda: float("-inf"), lambda: None
    )


async def test_up_edits_a_message_that_begins_with_a_slash() -> None:
    with create_pipe_input() as input:
        prompt = open_prompt(input)
        input.send_text(UP + ENTER)
        assert await prompt.read(last=LastMessage("id", "/delete")) == TypedLine("//delete", "id")
