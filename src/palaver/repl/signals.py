"""Ctrl+C as a callback."""

from __future__ import annotations

import asyncio
import signal
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
