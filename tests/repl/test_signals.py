"""Ctrl+C that arrives as a signal: while the terminal is between two prompts."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from palaver.repl.commands import table
from palaver.repl.input import KeyActions, LastMessage, TypedLine
from palaver.repl.screen import Screen, console
from palaver.repl.session import Session
from palaver.repl.settings import SessionSettings
from palaver.repl.signals import handle_interrupt
from tests.chat.scripted_service import open_stage


async def interrupt() -> None:
    """Sends the signal and waits until the loop has handled it."""
    handled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.set)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGUSR1)
    await handled.wait()


async def test_the_outer_handler_is_back_after_an_inner_one() -> None:
    calls: list[str] = []
    with handle_interrupt(lambda: calls.append("outer")):
        with handle_interrupt(lambda: calls.append("inner")):
            await interrupt()
        await interrupt()
    assert calls == ["inner", "outer"]


class InterruptedLines:
    """Each line is interrupted as soon as it was read."""

    is_interactive = False

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.initial: list[str | None] = []

    async def read(self, initial: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        self.initial.append(initial.text if initial else None)
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        await interrupt()
        return TypedLine(line)

    async def ask(self, question: str) -> str:
        raise EOFError

    def watch_keys(self, actions: KeyActions) -> AbstractContextManager[None]:
        return handle_interrupt(actions.on_interrupt)

    def released(self) -> AbstractContextManager[None]:
        return nullcontext()


async def test_an_interrupt_between_the_prompt_and_the_message(tmp_path: Path) -> None:
    """The text of a message goes back to the prompt, a command is dropped, and nothing is sent."""
    async with open_stage(tmp_path) as stage:
        shown = io.StringIO()
        session = Session(stage.chat, SessionSettings(tmp_path), Screen(console(shown), live=False), table())
        lines = session.lines = InterruptedLines("Hello there", "/title A new title")
        await session.run()
        assert lines.initial == [None, "Hello there", None]
        assert shown.getvalue().count("Cancelled.") == 2
        assert await stage.chat.conversations() == ()
