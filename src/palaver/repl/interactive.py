"""An interactive session: the prompt, its keys (Ctrl+C, Ctrl+T, Ctrl+L, Up) and its history file.

The prompt is usable while the model loads."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.application import in_terminal
from prompt_toolkit.completion import Completer
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input, create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style
from rich.text import Text

from palaver.chat.interface import ModelState
from palaver.errors import PalaverError
from palaver.repl import strings
from palaver.repl.command_table import CommandCompleter, escape_message
from palaver.repl.commands.thinking import toggle
from palaver.repl.input import DOUBLE_PRESS_SECONDS, KeyActions, LastMessage, ReplyDropped, TypedLine
from palaver.repl.status import first_screen, loading_line, ready_lines
from palaver.repl.terminal_mode import KeyMode
from palaver.repl.text import sanitize
from palaver.repl.typeahead import ENTER, keep_typed_ahead, watch_keys

if TYPE_CHECKING:
    from palaver.repl.session import Session

MARK = "› "
ROOM_FOR_ANSWER = 4
"""Columns after a question."""
MAX_HISTORY_BYTES = 2_000_000
"""The size to which an oversized history file is truncated; the oldest lines are dropped."""
_POLL_SECONDS = 0.25
"""Interval at which the loading progress is read."""
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse"})


async def run_interactive(session: Session) -> None:
    input = create_input(sys.stdin)
    mode = KeyMode(input.fileno())
    with mode.active():
        keep_typed_ahead(input)
        await _run(session, input, mode)


async def _run(session: Session, input: Input, mode: KeyMode) -> None:
    tasks: set[asyncio.Task[None]] = set()

    def on_toggle() -> None:
        task = asyncio.create_task(_toggle_thinking(session))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
    output.write_raw(ENTER)  # over what was typed meanwhile
    output.erase_end_of_line()
    output.flush()
    prompt = PromptLine(
        input,
        output,
        mode,
        open_history(session.settings.folder / "history"),
        CommandCompleter(session.table, session),
        lambda: session.stopped_at,
        on_toggle,
    )
    session.lines = prompt
    session.screen.show(*first_screen(await session.chat.model(), session.settings.is_attached), Text())
    watcher = asyncio.create_task(_watch_model(session, prompt))
    try:
        with log_to_screen(session):
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


class ScreenHandler(logging.Handler):
    """Shows warnings above the prompt and the live lines. Written to stderr, they would go into the middle of these."""

    def __init__(self, session: Session) -> None:
        super().__init__(logging.WARNING)
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """May be called from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._start, sanitize(self.format(record)), context=self._context)

    def _start(self, text: str) -> None:
        task = self._loop.create_task(self._show(text))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _show(self, text: str) -> None:
        async with in_terminal():
            self._session.screen.note(text)


@contextmanager
def log_to_screen(session: Session) -> Iterator[None]:
    handler, root = ScreenHandler(session), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class EditState:
    """The message that the Up key edits, and whether it is being edited."""

    def __init__(self) -> None:
        self.last: LastMessage | None = None
        self.edited_id: str | None = None


class PromptLine:
    """A line editor with history and completion. Ctrl+D on an empty line ends it."""

    is_interactive = True

    def __init__(
        self,
        input: Input,
        output: Output,
        mode: KeyMode,
        history: History,
        completer: Completer,
        stopped_at: Callable[[], float],
        on_toggle: Callable[[], None],
    ) -> None:
        self.input = input
        self._output = output
        self._mode = mode
        self._editing = EditState()
        self._session: PromptSession[str] = PromptSession(
            self._message,
            input=input,
            output=output,
            history=history,
            completer=completer,
            complete_while_typing=Condition(self._is_command),
            complete_style=CompleteStyle.COLUMN,
            reserve_space_for_menu=6,
            key_bindings=key_bindings(self._editing, stopped_at, on_toggle),
            multiline=True,
            prompt_continuation="  ",
            enable_suspend=True,
            style=_STYLE,
        )
        self._question_session: PromptSession[str] = PromptSession(
            input=input, output=output, key_bindings=ignore_mouse(KeyBindings())
        )

    async def read(self, initial: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        self._editing.last = last
        self._editing.edited_id = initial.edited_id if initial else None
        text = await self._session.prompt_async(default=initial.text if initial else "", handle_sigint=False)
        return TypedLine(_replace_bytes(text), self._editing.edited_id)

    async def ask(self, question: str) -> str:
        """Asks; a question that is longer than a line is broken between words."""
        width = max(1, self._output.get_size().columns - ROOM_FOR_ANSWER)
        shown = "\n".join(textwrap.wrap(question, width, replace_whitespace=False))
        try:
            return _replace_bytes(await self._question_session.prompt_async(f"{shown} ", handle_sigint=False))
        except KeyboardInterrupt:
            raise EOFError from None

    def set_status(self, status: str) -> None:
        """Shows a status line below the prompt; an empty one removes it."""
        self._session.bottom_toolbar = status or None
        self._session.app.invalidate()

    def watch_keys(self, actions: KeyActions) -> AbstractContextManager[None]:
        return watch_keys(self.input, self._output, actions)

    def released(self) -> AbstractContextManager[None]:
        return self._mode.suspended()

    def _message(self) -> StyleAndTextTuples:
        return [("bold", f"edit {MARK}" if self._editing.edited_id else MARK)]

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


def _replace_bytes(text: str) -> str:
    """The text with U+FFFD for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def key_bindings(editing: EditState, stopped_at: Callable[[], float], on_toggle: Callable[[], None]) -> KeyBindings:
    """The prompt's key bindings in addition to prompt_toolkit's defaults."""
    keys = ignore_mouse(KeyBindings())

    @Condition
    def is_empty() -> bool:
        from prompt_toolkit.application import get_app

        return not get_app().current_buffer.text and editing.last is not None

    @Condition
    def is_editing() -> bool:
        return editing.edited_id is not None

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        """Sends the text; after a backslash it inserts a newline."""
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # accepts the menu's choice; the next Enter sends it
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        """Clears the line; shortly after a stop it drops the stopped reply."""
        buffer = event.current_buffer
        if not buffer.text and time.monotonic() - stopped_at() < DOUBLE_PRESS_SECONDS:
            event.app.exit(exception=ReplyDropped())
            return
        buffer.reset()
        editing.edited_id = None

    @keys.add("c-t")
    def _(event: KeyPressEvent) -> None:
        on_toggle()

    @keys.add("up", filter=is_empty & ~is_editing)
    def _(event: KeyPressEvent) -> None:
        """Puts the last message into the prompt to edit it."""
        assert editing.last is not None
        editing.edited_id = editing.last.id
        event.current_buffer.insert_text(escape_message(editing.last.text))

    @keys.add("up", filter=is_editing)
    def _(event: KeyPressEvent) -> None:
        """Goes from the first line of an edited message to the history."""
        buffer = event.current_buffer
        if buffer.document.cursor_position_row == 0:
            editing.edited_id = None
        buffer.auto_up()

    return keys


def ignore_mouse(keys: KeyBindings) -> KeyBindings:
    """Ignores what looks like an event of the mouse, which is off. A pasted colour (ESC [ 31 m) does, and
    prompt_toolkit's own binding fails on it."""

    @keys.add(Keys.Vt100MouseEvent)
    def _(event: KeyPressEvent) -> None:
        pass

    return keys


def open_history(path: Path) -> History:
    """The history in that file, created if missing; in memory if the file can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        _truncate(path)
    except OSError:
        return InMemoryHistory()
    return InputHistory(path)


class InputHistory(FileHistory):
    """Lines that the file can't take, because the disk is full, are kept in memory."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _truncate(path: Path) -> None:
    """Cuts the file at the start of an entry: a blank line followed by a comment."""
    if path.stat().st_size <= 2 * MAX_HISTORY_BYTES:
        return
    tail = path.read_bytes()[-MAX_HISTORY_BYTES:]
    start = tail.find(b"\n\n# ")
    path.write_bytes(tail[start + 1 :] if start >= 0 else b"")
