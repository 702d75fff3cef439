"""A session with a scripted model in this process: lines in, text out."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from palaver.repl.commands import table
from palaver.repl.input import KeyActions, LastMessage, TypedLine
from palaver.repl.screen import Screen, console
from palaver.repl.session import Session
from palaver.repl.settings import SessionSettings
from tests.chat.scripted_service import CONTROL, OTHER, TOKENIZER, WAVE, Stage, open_stage
from tests.scripted_engine import Script

PLAIN = [*TOKENIZER.encode(["Just an answer."]), CONTROL["<|im_end|>"]]
"""A reply without a thought."""


class TypedLines:
    """A user who types the lines that the test gives."""

    is_interactive = True

    async def read(self, initial: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        raise EOFError

    async def ask(self, question: str) -> str:
        raise EOFError

    def watch_keys(self, actions: KeyActions) -> AbstractContextManager[None]:
        return nullcontext()

    def released(self) -> AbstractContextManager[None]:
        return nullcontext()


class ScriptedSession:
    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self._shown = io.StringIO()
        screen = Screen(console(self._shown, 200), live=False)
        self.session = Session(stage.chat, SessionSettings(folder), screen, table())
        self.session.lines = TypedLines()

    async def do(self, line: str) -> str:
        """Runs one line. Returns what was shown besides the reply."""
        self._shown.seek(0)
        self._shown.truncate()
        await self.session.handle_line(TypedLine(line))
        return self._shown.getvalue().strip()


@asynccontextmanager
async def open_session(
    folder: Path, *scripts: Script, context: int = 4096, held: bool = False
) -> AsyncIterator[ScriptedSession]:
    async with open_stage(folder, scripts or (WAVE, OTHER), context=context, held=held) as stage:
        await stage.chat.wait_until_ready()
        yield ScriptedSession(stage, folder)
