"""The line at which a person types."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import CompleteStyle

from palaver.repl.input import KeyActions, LastMessage, ReplyDropped, TypedLine
from palaver.repl.plain import interrupts

TWICE = 1.0
"""Within so many seconds a second Ctrl+C belongs to the first."""


class EditState:
    """What the prompt knows of the message that is being edited with the Up key."""

    def __init__(self) -> None:
        self.last: LastMessage | None = None
        self.edited: str | None = None


def key_bindings(editing: EditState, stopped_at: Callable[[], float], toggled: Callable[[], None]) -> KeyBindings:
    """The keys of the prompt, beside those that every line editor has."""
    keys = KeyBindings()

    @Condition
    def is_empty() -> bool:
        from prompt_toolkit.application import get_app

        return not get_app().current_buffer.text and editing.last is not None

    @Condition
    def is_editing() -> bool:
        return editing.edited is not None

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        """Sends; behind a backslash it makes a new line."""
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # the menu's choice is taken, and sent with the next Enter
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
        """Clears the line; soon after a stop it drops what was stopped."""
        buffer = event.current_buffer
        if not buffer.text and time.monotonic() - stopped_at() < TWICE:
            event.app.exit(exception=ReplyDropped())
            return
        buffer.reset()
        editing.edited = None

    @keys.add("c-t")
    def _(event: KeyPressEvent) -> None:
        toggled()

    @keys.add("up", filter=is_empty & ~is_editing)
    def _(event: KeyPressEvent) -> None:
        """The last message, to be said in other words."""
        assert editing.last is not None
        editing.edited = editing.last.id
        event.current_buffer.insert_text(editing.last.text)

    @keys.add("up", filter=is_editing)
    def _(event: KeyPressEvent) -> None:
        """Above its first line, the history."""
        buffer = event.current_buffer
        if buffer.document.cursor_position_row == 0:
            editing.edited = None
        buffer.auto_up()

    return keys


@contextmanager
def watch_keys(input: Input, output: Output, watched: KeyActions) -> Iterator[None]:
    """Inside, Ctrl+C and Ctrl+T are acted on at once; whatever else is typed waits for the next prompt."""
    ahead: list[KeyPress] = []

    def read() -> None:
        for press in input.read_keys():
            if press.key == Keys.ControlC:
                ahead.clear()
                watched.interrupted()
            elif press.key == Keys.ControlT:
                watched.toggled()
            elif press.key not in (Keys.CPRResponse, Keys.Vt100MouseEvent):
                ahead.append(press)

    output.enable_bracketed_paste()
    output.flush()
    try:
        with input.raw_mode(), input.attach(read), interrupts(watched.interrupted):
            yield
    finally:
        output.disable_bracketed_paste()
        output.flush()
        store_typeahead(input, [*ahead, *input.flush_keys()])


MARK = "› "


class PromptLine:
    """A line editor with history and completion. Ctrl+D on an empty line ends it."""

    is_person = True

    def __init__(
        self,
        input: Input,
        output: Output,
        history: History,
        completer: Completer,
        stopped_at: Callable[[], float],
        toggled: Callable[[], None],
    ) -> None:
        self._input = input
        self._output = output
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
            key_bindings=key_bindings(self._editing, stopped_at, toggled),
            multiline=True,
            prompt_continuation="  ",
            enable_suspend=True,
        )
        self._asking: PromptSession[str] = PromptSession(input=input, output=output)

    async def read(self, begun: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
        self._editing.last = last
        self._editing.edited = begun.edited if begun else None
        text = await self._session.prompt_async(default=begun.text if begun else "", handle_sigint=False)
        return TypedLine(text, self._editing.edited)

    async def ask(self, question: str) -> str:
        try:
            return await self._asking.prompt_async(f"{question} ", handle_sigint=False)
        except KeyboardInterrupt:
            raise EOFError from None

    def tell(self, standing: str) -> None:
        """What goes on in the background, below the line; nothing takes it away."""
        self._session.bottom_toolbar = standing or None
        self._session.app.invalidate()

    def watching(self, watched: KeyActions) -> AbstractContextManager[None]:
        return watch_keys(self._input, self._output, watched)

    def _message(self) -> StyleAndTextTuples:
        return [("bold", f"edit {MARK}" if self._editing.edited else MARK)]

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")


KEPT = 2_000_000
"""Bytes of the file that are kept when it is opened; older lines go."""


def open_history(path: Path) -> History:
    """The history in that file, which is made where it is not there; one in memory where it can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _shorten(path: Path) -> None:
    """An entry begins with a blank line and a comment: the file is cut before one."""
    if path.stat().st_size <= 2 * KEPT:
        return
    tail = path.read_bytes()[-KEPT:]
    place = tail.find(b"\n\n# ")
    path.write_bytes(tail[place + 1 :] if place >= 0 else b"")
