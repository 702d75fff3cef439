"""Checks grammars in a separate process, so that a crash, a hang or a lack of memory ends only that check.

This is the parent's side; `trial.py` runs in the process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import Any

from palaver.constraints import Constraint, Grammar, MarkerConstraint
from palaver.engines.grammars.compiler import special_ids
from palaver.errors import EngineClosed, EngineError
from palaver.phases import Vocabulary
from palaver.processes import receive, send, send_descriptor


def pack_constraint(constraint: Constraint) -> dict[str, Any]:
    ids = constraint.ids if isinstance(constraint, MarkerConstraint) else None
    return {"grammar": constraint.grammar.value, "text": constraint.text, "ids": ids}


def unpack_constraint(message: dict[str, Any]) -> Constraint:
    grammar, text, ids = Grammar(message["grammar"]), message["text"], message["ids"]
    return Constraint(grammar, text) if ids is None else MarkerConstraint(grammar, text, tuple(ids))


WALL_SECONDS = 10.0
"""The longest that a check may take, waiting for the CPU included."""
_START_SECONDS = 30.0
"""How long a process may take to start a check, if it was just started or builds another tokenizer first."""
_EXIT_SECONDS = 5.0
TOO_MUCH = "it takes too much time, memory or depth to compile"


class GrammarSandbox:
    """A warm process that compiles each grammar in a fork of itself. The first check starts it; a check after its
    death starts it again."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process unless it runs."""
        with self._lock:
            self._ensure_started()

    def rejection_reason(self, constraint: Constraint) -> str | None:
        """Why the grammar is rejected, or None. Blocks until the check is done; checks run in parallel.

        Raises EngineError if the check could not be made.
        """
        parent_end, child_end = socket.socketpair()
        with parent_end:
            with child_end:
                self._submit(child_end, special_ids(constraint))
            try:
                parent_end.settimeout(_START_SECONDS)
                receive(parent_end)
            except (EOFError, OSError) as error:
                raise EngineError("The grammar could not be checked: the sandbox process did not answer.") from error
            try:
                parent_end.settimeout(WALL_SECONDS + _EXIT_SECONDS)
                send(parent_end, pack_constraint(constraint))
                reason: str | None = receive(parent_end)["why"]
            except (EOFError, OSError):
                return TOO_MUCH
            return reason

    def close(self) -> None:
        """Ends the process. Running checks fail."""
        with self._lock:
            self._closed = True
            self._stop()

    def _submit(self, child_end: socket.socket, ids: tuple[int, ...]) -> None:
        with self._lock:
            connection = self._ensure_started()
            try:
                send_descriptor(connection, child_end.fileno())
                send(connection, ids)
            except OSError as error:
                raise EngineError("The grammar could not be checked: the sandbox process ended.") from error

    def _ensure_started(self) -> socket.socket:
        if self._closed:
            raise EngineClosed
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._stop()
        parent_end, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-m", "palaver.engines.grammars.trial", str(child_end.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL)
        self._connection = parent_end
        parent_end.settimeout(_START_SECONDS)
        try:
            send(parent_end, [token.decode("latin-1") for token in self._vocabulary])
        except OSError as error:
            raise EngineError("The grammar could not be checked: the sandbox process did not start.") from error
        return parent_end

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
