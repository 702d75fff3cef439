"""What is typed while a reply is written: it stands in the next prompt, but for the keys that act at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from palaver.repl.input import KeyActions
from palaver.repl.signals import handle_interrupt

ENTER = "\r"


def keep_typed_ahead(input: Input) -> None:
    """Keeps for the prompt what was typed before it, in the terminal's line mode, where Enter is a line feed."""
    presses: list[KeyPress] = []
    with input.raw_mode():
        while read := input.read_keys():
            presses += read
    enter = KeyPress(Keys.ControlM, ENTER)
    store_typeahead(input, [enter if press.key == Keys.ControlJ else press for press in presses])


@contextmanager
def watch_keys(input: Input, output: Output, actions: KeyActions) -> Iterator[None]:
    """Inside the context, Ctrl+C, Ctrl+T and Ctrl+L act at once; all other keys are kept for the next prompt."""
    typed_ahead: list[KeyPress] = []

    def read() -> None:
        handle(input.read_keys())

    def handle(presses: Iterable[KeyPress]) -> None:
        for press in presses:
            if press.key == Keys.ControlC:
                typed_ahead.clear()
                actions.on_interrupt()
            elif press.key == Keys.ControlT:
                actions.on_toggle()
            elif press.key == Keys.ControlL:  # not kept: the prompt would ask for the cursor before it can read
                actions.on_clear()
            elif press.key not in (Keys.CPRResponse, Keys.Vt100MouseEvent):
                typed_ahead.append(press)

    output.enable_bracketed_paste()
    output.flush()
    try:
        with input.raw_mode(), input.attach(read), handle_interrupt(actions.on_interrupt):
            handle(get_typeahead(input))  # keys that the prompt read behind Enter
            yield
    finally:
        output.disable_bracketed_paste()
        output.flush()
        store_typeahead(input, [*typed_ahead, *input.flush_keys()])
