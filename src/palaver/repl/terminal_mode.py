"""The terminal's mode between two prompts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

if sys.platform != "win32":
    import termios


class KeyMode:
    """Keys reach the next prompt as they were typed: in line mode, Enter would arrive as a line feed, which is Ctrl+J.

    They are not echoed. Ctrl+C stays a signal. Does nothing on Windows and for an input that is no terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._line_mode = _read_mode(fd)
        self._key_mode = _as_keys(fd, self._line_mode)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._restored_at_sigterm():
            self._set_keys()
            try:
                yield
            finally:
                self._set_lines()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the context, the terminal is as it was before, for another program that reads from it."""
        self._set_lines()
        try:
            yield
        finally:
            self._set_keys()

    @contextmanager
    def _restored_at_sigterm(self) -> Iterator[None]:
        """Inside the context, SIGTERM ends the process as before, but the terminal is as it was. Main thread only."""
        if self._line_mode is None or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if _is_in_foreground(self._fd):
            self._set_lines()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _set_lines(self) -> None:
        _set_mode(self._fd, self._line_mode)

    def _set_keys(self) -> None:
        _set_mode(self._fd, self._key_mode)


def _read_mode(fd: int) -> list[Any] | None:
    if sys.platform == "win32":
        return None
    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None


def _set_mode(fd: int, mode: list[Any] | None) -> None:
    """Does nothing for a terminal that is gone: the error that comes of it must not hide the one under way."""
    if sys.platform != "win32" and mode is not None:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, mode)


def _is_in_foreground(fd: int) -> bool:
    """In the background the terminal is another program's, and setting its mode would stop this process."""
    if sys.platform == "win32":
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def _as_keys(fd: int, line_mode: list[Any] | None) -> list[Any] | None:
    if sys.platform == "win32" or line_mode is None:
        return None
    iflag, oflag, cflag, lflag, ispeed, ospeed, characters = line_mode
    iflag &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON)
    lflag &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    characters = list(characters)
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    for key in (termios.VSUSP, termios.VQUIT):  # Ctrl+Z is a key of the prompt, Ctrl+\ would leave this mode
        characters[key] = bytes([os.fpathconf(fd, "PC_VDISABLE") & 0xFF])
    return [iflag, oflag, cflag, lflag, ispeed, ospeed, characters]
