r"""Ctrl+C as a callback; Ctrl+C and Ctrl+\ in other programs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_interrupt_handlers: list[Callable[[], object]] = []
"""The handlers of the contexts that are open, the innermost last."""


@contextmanager
def handle_interrupt(handler: Callable[[], object]) -> Iterator[None]:
    """Inside the context, Ctrl+C calls the handler instead of raising KeyboardInterrupt. Contexts may be nested."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, handler)
    except (NotImplementedError, RuntimeError):  # not the main thread, or no signals on this system
        yield
        return
    _interrupt_handlers.append(handler)
    try:
        yield
    finally:
        _interrupt_handlers.pop()
        if _interrupt_handlers:
            loop.add_signal_handler(signal.SIGINT, _interrupt_handlers[-1])
        else:
            loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def ignore_key_signals() -> Iterator[None]:
    r"""Inside the context, Ctrl+C and Ctrl+\ are keys of a program that was started: the terminal sends their signals
    to this process, too. They are not set to SIG_IGN, which the program would inherit."""
    with handle_interrupt(lambda: None):
        if sys.platform == "win32":
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, lambda: None)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGQUIT)
