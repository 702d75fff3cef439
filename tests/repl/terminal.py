"""Runs the real program at a pseudo-terminal and emulates its screen."""

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
CTRL_C, CTRL_D, CTRL_L, CTRL_R, CTRL_T, CTRL_BACKSLASH = "\x03", "\x04", "\x0c", "\x12", "\x14", "\x1c"
MARK = "›"
TIMEOUT = 180.0
HANGUP_TIMEOUT = 10.0


def _at_prompt(shown: str) -> bool:
    return shown.endswith(MARK)


class Screen(pyte.HistoryScreen):
    """Keeps the whole scrollback."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines, history=100_000, ratio=0.5)


class Terminal:
    """Drives the program. Waits for text on the screen, never for a fixed time."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> None:
        """`echo`: whether the terminal shows keys that the program does not read at once, as real ones do."""
        inherited = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
        variables = {**inherited, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(environment or {})}
        self.screen = Screen(columns, rows)
        self.screen.write_process_input = self._respond  # type: ignore[method-assign]
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._child: Any = pexpect.spawn(
            command[0],
            list(command[1:]),
            dimensions=(rows, columns),
            env=variables,
            echo=echo,
            timeout=None,
            preexec_fn=_hear_hangups,
        )
        self._child.delaybeforesend = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the program and waits for it. pexpect's own `close` fails if that takes over a tenth of a second."""
        if self._child.isalive():
            self._child.kill(signal.SIGHUP)
            self._read_to_the_end(HANGUP_TIMEOUT)
            self._child.kill(signal.SIGKILL)
            self._child.wait()
        self._child.close()

    @property
    def pid(self) -> int:
        return int(self._child.pid)

    def _respond(self, data: str) -> None:
        self._child.send(data)

    # input

    def type(self, text: str) -> None:
        self._child.send(text)

    def enter(self, text: str = "") -> None:
        """Types a line, waits until it is shown, and sends it."""
        self.type(text)
        end = "".join(text[-20:].split())
        self.wait(lambda shown: end in "".join(shown.rpartition(MARK)[2].split()))
        self.type(ENTER)

    def do(self, text: str, timeout: float = TIMEOUT) -> str:
        """Sends a line and waits for the next prompt. Returns what was shown since the line."""
        self.enter(text)
        self.wait(_at_prompt, timeout)
        whole = self.transcript()
        return whole[whole.rindex(f"{MARK} {text[:20]}") :]

    def stop(self) -> None:
        """Stops the reply that runs. Fails as soon as there is a prompt if the reply was over."""
        self.type(CTRL_C)
        shown = self.prompt()
        assert re.search(r"Stopped\. /continue picks up where it left off\.\n+›\Z", shown), shown

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._child.setwinsize(rows, columns)

    def kill(self) -> None:
        os.killpg(os.getpgid(self.pid), signal.SIGKILL)
        self.wait_for_exit()

    # output

    def shown(self) -> str:
        """The current screen without trailing blank rows."""
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip()

    def transcript(self) -> str:
        """The scrollback and the current screen."""
        above = ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in self.screen.history.top]
        return "\n".join([*above, self.shown()])

    def forget(self) -> None:
        """Clears the scrollback."""
        self.screen.history.top.clear()
        self.written = b""

    def wait(self, expected: str | Callable[[str], bool], timeout: float = TIMEOUT) -> str:
        """Waits until the screen matches the pattern or satisfies the function. Returns the screen."""
        check = expected if callable(expected) else lambda text: re.search(expected, text, re.MULTILINE) is not None
        deadline = time.monotonic() + timeout
        while not check(self.shown()):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"never seen: {expected}\n--- the screen:\n{self.transcript()}")
        return self.shown()

    def until(self, expected: str, timeout: float = TIMEOUT) -> str:
        """Waits until the transcript matches the pattern. Returns the transcript."""
        deadline = time.monotonic() + timeout
        while not re.search(expected, self.transcript(), re.MULTILINE):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"never seen: {expected}\n--- the screen:\n{self.transcript()}")
        return self.transcript()

    def see(self, expected: str, timeout: float = TIMEOUT) -> str:
        """Waits until the screen has matched the pattern, however briefly. Returns that screen.

        Output is shown update by update, so that none is missed if this process reads late."""
        seen: list[str] = []

        def look() -> None:
            if not seen and re.search(expected, self.shown(), re.MULTILINE):
                seen.append(self.shown())

        look()
        deadline = time.monotonic() + timeout
        while not seen:
            if not self._read(deadline - time.monotonic(), look):
                raise AssertionError(f"never seen: {expected}\n--- the screen:\n{self.transcript()}")
        return seen[0]

    def prompt(self) -> str:
        """Waits until the last non-blank row is an empty prompt."""
        return self.wait(_at_prompt)

    def wait_for_exit(self, timeout: float = TIMEOUT) -> int:
        """Reads until the program exits. Returns its exit status."""
        self._read_to_the_end(timeout)
        assert not self._child.isalive() or self._child.wait() is not None
        return int(self._child.exitstatus if self._child.exitstatus is not None else -self._child.signalstatus)

    def _read_to_the_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._read(deadline - time.monotonic()):
            pass

    def _read(self, timeout: float, on_update: Callable[[], None] | None = None) -> bool:
        """Reads output of the program. Returns False at the end of the output or after the timeout.

        `on_update` is called after each update of the screen in it."""
        if timeout <= 0:
            return False
        try:
            data = self._child.read_nonblocking(65536, timeout=timeout)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return False
        self.written += data
        for update in re.split(rb"(?<=\x1b\[\?2026l)", data) if on_update else [data]:
            self._stream.feed(update)
            if on_update:
                on_update()
        return True


def _hear_hangups() -> None:
    """The program would ignore them where the tests do, as under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


_REMOVED_VARIABLES = ("NO_COLOR", "COLUMNS", "LINES", "EDITOR", "VISUAL", "TMUX", "VTE_VERSION", "CI")
