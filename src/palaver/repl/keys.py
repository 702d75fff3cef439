"""What the keys do: at the prompt, and while a reply is coming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit.filters import Condition
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from palaver.repl.lines import Dropped, Last, Watched
from palaver.repl.plain import interrupts

TWICE = 1.0
"""Within so many seconds a second Ctrl+C belongs to the first."""


class Editing:
    """What the prompt knows of the message that is being edited with the Up key."""

    def __init__(self) -> None:
        self.last: Last | None = None
        self.edited: str | None = None


def bindings(editing: Editing, stopped_at: Callable[[], float], toggled: Callable[[], None]) -> KeyBindings:
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
            event.app.exit(exception=Dropped())
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
def watching(input: Input, output: Output, watched: Watched) -> Iterator[None]:
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
