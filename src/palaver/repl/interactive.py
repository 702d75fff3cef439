"""A session with a person at a terminal: the prompt is there while the model loads."""

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
from palaver.repl.commands.thinking import toggle
from palaver.repl.completion import CommandCompleter
from palaver.repl.prompt import PromptLine, open_history
from palaver.repl.status import banner, loading_line

if TYPE_CHECKING:
    from palaver.repl.session import Session

_LOOKS = 0.25
"""Seconds between looks at how far a model is."""


async def run_interactive(session: Session) -> None:
    tasks: set[asyncio.Task[None]] = set()

    def toggled() -> None:
        task = asyncio.create_task(_toggled(session))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    prompt = PromptLine(
        create_input(sys.stdin),
        create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        open_history(session.settings.folder / "history"),
        CommandCompleter(session.table, session),
        lambda: session.stopped_at,
        toggled,
    )
    session.lines = prompt
    watching = asyncio.create_task(_watched(session, prompt))
    try:
        await session.begin()
        await session.run()
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watched(session: Session, prompt: PromptLine) -> None:
    """Tells how far the model is, and what it is when it is there."""
    card = await session.chat.model()
    while card.state is ModelState.LOADING:
        prompt.tell(loading_line(card))
        await asyncio.sleep(_LOOKS)
        with suppress(PalaverError):
            card = await session.chat.model()
    prompt.tell("")
    async with in_terminal():
        session.screen.show(*banner(card), Text())


async def _toggled(session: Session) -> None:
    async with in_terminal():
        with suppress(PalaverError):
            await toggle(session)
