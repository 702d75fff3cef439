"""The sandbox in which each grammar is tried before the engine compiles it.

It is a separate process, so that a crash, a hang or a lack of memory ends only that check. `sandbox_child.py` runs in
the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from palaver.constraints import Constraint, Grammar, MarkerConstraint
from palaver.engines.grammars.compiler import special_ids
from palaver.errors import EngineClosed, EngineError
from palaver.phases import Vocabulary
from palaver.processes import EXIT_SECONDS, ForkFailed, ForkServer, ForkServerClosed, receive, send

WALL_SECONDS = 10.0
"""The longest that a check may take, waiting for the CPU included."""
_START_SECONDS = 30.0
"""How long a process may take to start a check, if it was just started or builds another tokenizer first."""
TOO_MUCH = "it takes too much time, memory or depth to compile"


def pack_constraint(constraint: Constraint) -> dict[str, Any]:
    ids = constraint.ids if isinstance(constraint, MarkerConstraint) else None
    return {"grammar": constraint.grammar.value, "text": constraint.text, "ids": ids}


def unpack_constraint(message: dict[str, Any]) -> Constraint:
    grammar, text, ids = Grammar(message["grammar"]), message["text"], message["ids"]
    return Constraint(grammar, text) if ids is None else MarkerConstraint(grammar, text, tuple(ids))


class GrammarSandbox:
    """Compiles each grammar in a fork of a warm process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._forks = ForkServer(
            "palaver.engines.grammars.sandbox_child",
            _START_SECONDS,
            lambda: [token.decode("latin-1") for token in vocabulary],
        )

    def start(self) -> None:
        """Starts the process unless it runs."""
        with _translate_errors():
            self._forks.start()

    def rejection_reason(self, constraint: Constraint) -> str | None:
        """Why the grammar is rejected, or None. Blocks until the check is done; checks run in parallel.

        Raises EngineError if the check could not be made.
        """
        with _translate_errors(), self._forks.fork(special_ids(constraint)) as connection:
            try:
                connection.settimeout(WALL_SECONDS + EXIT_SECONDS)
                send(connection, pack_constraint(constraint))
                reason: str | None = receive(connection)["why"]
            except (EOFError, OSError):
                return TOO_MUCH
            return reason

    def close(self) -> None:
        """Ends the process. Running checks fail."""
        self._forks.close()


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except ForkServerClosed:
        raise EngineClosed from None
    except ForkFailed as error:
        raise EngineError(f"The grammar could not be checked: the sandbox process {error}.") from error
