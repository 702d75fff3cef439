"""Starts an engine process. This module imports little, so that the process can start before its parent is ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_THREAD_DEFAULTS = {"GOMP_SPINCOUNT": "20000"}
"""OpenMP threads spin for about a millisecond while they wait for the next pass. By default they spin much longer and
keep the event loops, which deliver the tokens, from their cores."""


def environment() -> dict[str, str]:
    """The environment of the process: libraries read it when they load. The user's own settings take precedence."""
    return _THREAD_DEFAULTS | os.environ


class ChildProcess:
    """A started engine process. It imports what every engine needs, and waits for the spec of its engine.

    Start it in a thread that lives as long as the process: on Linux it dies with that thread. Leaving its context kills
    it, unless a supervisor has connected to it.
    """

    def __init__(self) -> None:
        """Raises OSError if the process can't be started."""
        self._connection, child_end = socket.socketpair()
        self._stderr, writable = os.pipe()
        self._connected = False
        command = [sys.executable, "-m", "palaver.engines.host", str(child_end.fileno())]
        try:
            self.popen = subprocess.Popen(
                command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, stderr=writable, env=environment()
            )
        except OSError:
            self._close()
            raise
        finally:
            child_end.close()
            os.close(writable)

    def connect(self) -> tuple[socket.socket, int]:
        """The connection and the descriptor of the process's stderr. Both belong to the caller, as does the process."""
        assert not self._connected
        self._connected = True
        return self._connection, self._stderr

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self._connected:
            return
        self._close()
        self.popen.kill()
        self.popen.wait()

    def _close(self) -> None:
        self._connection.close()
        os.close(self._stderr)
