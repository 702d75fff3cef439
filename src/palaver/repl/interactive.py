"""An interactive session: the prompt is usable while the model loads."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from prompt_toolkit.application import in_terminal
from prompt_toolkit.input import create_input
from prompt_toolkit.output import create_output
from rich.text import Text

from palaver.chat.interface import ModelState
from palaver.errors import PalaverError
from palaver.repl import strings
from palaver.repl.commands.thinking import toggle
from palaver.repl.completion import CommandCompleter
from palaver.repl.prompt import PromptLine, open_history
from palaver.repl.status import first_screen, loading_line, ready_lines

if TYPE_CHECKING:
    from palaver.repl.session import Session

_POLL_SECONDS = 0.25
"""Interval at which the loading progress is read."""


async def run_interactive(session: Session) -> None:
    tasks: set[asyncio.Task[None]] = set()

    def on_toggle() -> None:
        task = asyncio.create_task(_toggle_thinking(session))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    prompt = PromptLine(
        create_input(sys.stdin),
        create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        open_history(session.settings.folder / "history"),
        CommandCompleter(session.table, session),
        lambda: session.stopped_at,
        on_toggle,
    )
    session.lines = prompt
    session.screen.show(*first_screen(await session.chat.model(), session.settings.is_attached), Text())
    watcher = asyncio.create_task(_watch_model(session, prompt))
    try:
        await session.open_initial()
        await session.run()
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _watch_model(session: Session, prompt: PromptLine) -> None:
    """Shows the loading progress below the prompt, then what was loaded."""
    card = await session.chat.model()
    while card.state is ModelState.LOADING:
        prompt.set_status(strings.TYPE_ALREADY.format(line=loading_line(card)))
        await asyncio.sleep(_POLL_SECONDS)
        with suppress(PalaverError):
            card = await session.chat.model()
    prompt.set_status("")
    async with in_terminal():
        session.screen.show(*ready_lines(card), Text())


async def _toggle_thinking(session: Session) -> None:
    async with in_terminal():
        with suppress(PalaverError):
            await toggle(session)
