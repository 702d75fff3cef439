"""What vLLM's processes write while they start: the only place where they say why they could not."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STDERR = 2
MAX_LINES = 2000
MAX_LENGTH = 300
_ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt): \S.*)$")
_WAIT_S = 3.0
"""How long the lines of a process that has ended may be on their way, on a busy machine."""
_POLL_S = 0.05
GENERIC = ("initialization failed", "See stack trace", "See root cause")
"""Errors that only report another one."""


class StartupLog:
    """The lines that this process and the processes that it starts meanwhile write to stderr, where they still go."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Processes that are started inside of it keep writing through this one until they end."""
        readable, writable = os.pipe()
        stderr = os.dup(STDERR)
        os.dup2(writable, STDERR)
        os.close(writable)
        threading.Thread(target=self._copy, args=(readable, stderr), name="palaver-log", daemon=True).start()
        try:
            yield
        finally:
            os.dup2(stderr, STDERR)

    def _copy(self, readable: int, stderr: int) -> None:
        with open(readable, "rb", buffering=0) as stream:
            rest = b""
            while data := stream.read(1 << 16):
                os.write(stderr, data)
                *lines, rest = (rest + data).split(b"\n")
                self._lines += (line.decode("utf-8", "replace") for line in lines)

    def root_cause(self) -> str:
        """The first error that is not about another one; empty if there is none."""
        end = time.monotonic() + _WAIT_S
        while not (cause := find_root_cause(self._lines.copy())) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return cause


def find_root_cause(lines: Sequence[str]) -> str:
    found = (match[1] for line in lines if (match := _ERROR.search(line.rstrip())))
    return next((one[:MAX_LENGTH] for one in found if not any(words in one for words in GENERIC)), "")
