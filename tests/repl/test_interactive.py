"""The prompt: its keys, read from a pipe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import DummyCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input, create_pipe_input
from prompt_toolkit.output import DummyOutput

from palaver.repl.input import LastMessage, TypedLine
from palaver.repl.interactive import InputHistory, PromptLine, log_to_screen
from palaver.repl.terminal_mode import KeyMode
from tests.repl.scripted_session import open_session
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


async def test_pasted_colours_are_no_keys() -> None:
    """Of a terminal without bracketed paste. prompt_toolkit takes them for the mouse, and showed a traceback."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    with create_pipe_input() as input:
        prompt = open_prompt(input)
        input.send_text("a\x1b[31mred\x1b[0m\x1b[1;31mb" + ENTER)
        assert await asyncio.wait_for(prompt.read(), 10) == TypedLine("aredb")
        input.send_text("\x1b[31my" + ENTER)
        assert await prompt.ask("Run it?") == "y"
    assert not failures


async def test_pasted_bytes_that_are_not_utf_8_are_replaced() -> None:
    """The message was refused, and gone from the prompt."""
    with create_pipe_input() as input:
        prompt = open_prompt(input)
        input.send_bytes(b"caf\xe9 \xc3\xa9\r")
        assert await prompt.read() == TypedLine("caf\ufffd é")
        input.send_bytes(b"{\xe9}\r")
        assert await prompt.ask("Arguments:") == "{\ufffd}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is a file of Linux")
def test_a_full_disk_costs_no_line() -> None:
    history = InputHistory("/dev/full")
    history.append_string("Hello" * 10_000)
    assert history.get_strings() == ["Hello" * 10_000]


async def test_warnings_are_notes_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr they went into the middle of a reply, whose last lines were shown twice."""
    async with open_session(tmp_path) as session:
        shown: list[str] = []
        session.session.screen.note = shown.append  # type: ignore[method-assign, assignment]
        log = logging.getLogger("palaver.engines")
        with log_to_screen(session.session):
            await asyncio.to_thread(log.warning, "the engine was started again\x1b]0;owned\x07")
            await asyncio.wait_for(_until(lambda: bool(shown)), 10)
        log.warning("nobody is at the terminal")
    assert shown == ["the engine was started again␛]0;owned␇"], "no escape sequences of others"
    assert "started again" not in capsys.readouterr().err


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)
