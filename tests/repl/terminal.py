"""A terminal for tests: the real program behind a pseudo-terminal, and the screen as a person would see it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pexpect
import pyte

ENTER, ALT_ENTER, UP, TAB = "\r", "\x1b\r", "\x1b[A", "\t"
CTRL_C, CTRL_D, CTRL_R, CTRL_T = "\x03", "\x04", "\x12", "\x14"
MARK = "›"
PATIENCE = 180.0


def _at_prompt(shown: str) -> bool:
    return shown.endswith(MARK)


class Screen(pyte.HistoryScreen):
    """Keeps all that scrolled away."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines, history=100_000, ratio=0.5)


class Terminal:
    """Waits for what is to be seen; never for time to pass."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in _REMOVED}
        whole = {**inherited, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(environment or {})}
        self.screen = Screen(columns, rows)
        self.screen.write_process_input = self._answer  # type: ignore[method-assign]
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._child: Any = pexpect.spawn(
            command[0], list(command[1:]), dimensions=(rows, columns), env=whole, echo=False, timeout=None
        )
        self._child.delaybeforesend = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close(force=True)

    @property
    def pid(self) -> int:
        return int(self._child.pid)

    def _answer(self, data: str) -> None:
        self._child.send(data)

    # what a person does

    def type(self, text: str) -> None:
        self._child.send(text)

    def enter(self, text: str = "") -> None:
        """Types a line, sees it, and sends it."""
        self.type(text)
        end = "".join(text[-20:].split())
        self.wait(lambda shown: end in "".join(shown.rpartition(MARK)[2].split()))
        self.type(ENTER)

    def do(self, text: str, patience: float = PATIENCE) -> str:
        """Sends a line and waits for the next prompt; what was shown between the two."""
        self.enter(text)
        self.wait(_at_prompt, patience)
        whole = self.whole()
        return whole[whole.rindex(f"{MARK} {text[:20]}") :]

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._child.setwinsize(rows, columns)

    def kill(self) -> None:
        os.killpg(os.getpgid(self.pid), signal.SIGKILL)
        self.ended()

    # what a person sees

    def shown(self) -> str:
        """The screen now, without blank rows at its end."""
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip()

    def whole(self) -> str:
        """With everything that scrolled away."""
        above = ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in self.screen.history.top]
        return "\n".join([*above, self.shown()])

    def forget(self) -> None:
        """What scrolled away is no longer of interest."""
        self.screen.history.top.clear()
        self.written = b""

    def wait(self, wanted: str | Callable[[str], bool], patience: float = PATIENCE) -> str:
        """Until the screen shows it (a pattern, or what the function says); gives the screen."""
        check = wanted if callable(wanted) else lambda text: re.search(wanted, text, re.MULTILINE) is not None
        until = time.monotonic() + patience
        while not check(self.shown()):
            if not self._read(until - time.monotonic()):
                raise AssertionError(f"never seen: {wanted}\n--- the screen:\n{self.whole()}")
        return self.shown()

    def until(self, wanted: str, patience: float = PATIENCE) -> str:
        """The same, in all that was shown."""
        until = time.monotonic() + patience
        while not re.search(wanted, self.whole(), re.MULTILINE):
            if not self._read(until - time.monotonic()):
                raise AssertionError(f"never seen: {wanted}\n--- the screen:\n{self.whole()}")
        return self.whole()

    def prompt(self) -> str:
        """Until there is an empty prompt, in the last row that has something."""
        return self.wait(_at_prompt)

    def ended(self, patience: float = PATIENCE) -> int:
        """Reads to the end of the program; its exit status."""
        until = time.monotonic() + patience
        while self._read(until - time.monotonic()):
            pass
        assert not self._child.isalive() or self._child.wait() is not None
        return int(self._child.exitstatus if self._child.exitstatus is not None else -self._child.signalstatus)

    def _read(self, patience: float) -> bool:
        """Takes what the program wrote; False when there is nothing more to come, or not in time."""
        if patience <= 0:
            return False
        try:
            data = self._child.read_nonblocking(65536, timeout=patience)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return False
        self.written += data
        self._stream.feed(data)
        return True


_REMOVED = ("NO_COLOR", "COLUMNS", "LINES", "EDITOR", "VISUAL", "TMUX", "VTE_VERSION", "CI")
