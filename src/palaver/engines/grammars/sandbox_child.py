"""The sandbox's process: `python -m palaver.engines.grammars.sandbox_child FD`.

It imports the library and reads the vocabulary once. Each grammar is then compiled, and its first masks computed, in a
fork that the kernel ends at its limits on time, memory and stack.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from palaver.constraints import Constraint
from palaver.engines.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarError, first_line
from palaver.engines.grammars.sandbox import WALL_SECONDS, unpack_constraint
from palaver.processes import limit_fork, parent_connection, receive, send, serve_forks

CPU_SECONDS = 2
MEMORY_BYTES = 512 << 20
"""Memory that a fork may take beyond what it starts with."""
STACK_BYTES = 2 << 20
"""A small part of the stack of the engine's compiler threads, so that a grammar that passes here is safe there."""
MASK_COUNT = 4
MASK_SECONDS = 0.25
"""CPU time of one mask. The engine computes a mask for every token, and all requests wait for it."""


def main() -> None:
    connection = parent_connection()
    compiler = GrammarCompiler([token.encode("latin-1") for token in receive(connection)])
    compiler.tokenizer(())
    serve_forks(
        connection,
        lambda fork: _check_in_fork(fork, compiler),
        lambda: compiler.tokenizer(tuple(receive(connection))),
    )


def _check_in_fork(connection: socket.socket, compiler: GrammarCompiler) -> None:
    """Runs in the fork. Sends the result, unless a limit is exceeded, and ends the process."""
    limit_fork(connection, CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES)
    constraint = unpack_constraint(receive(connection))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: send(connection, {"why": rejection_reason(compiler, constraint)}))
    thread.start()
    thread.join()
    os._exit(0)


def rejection_reason(compiler: GrammarCompiler, constraint: Constraint) -> str | None:
    """Why the grammar is rejected, or None."""
    try:
        compiled = compiler.compile(constraint)
        for highest in (False, True):
            _compute_masks(compiled, highest)
    except GrammarError as error:
        return str(error)
    return None


def _compute_masks(compiled: CompiledGrammar, highest: bool) -> None:
    """Follows the allowed tokens with the highest ids, or with the lowest."""
    matcher = compiled.matcher()
    for _ in range(MASK_COUNT):
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        _raise_on_error(matcher)
        if time.thread_time() - started > MASK_SECONDS:
            raise GrammarError("it takes too long to check for each token")
        mask &= ~(1 << compiled.end_id)
        if not mask:
            return
        token_id = (mask if highest else mask & -mask).bit_length() - 1
        matcher.try_consume_tokens([token_id])
        _raise_on_error(matcher)


def _raise_on_error(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))


if __name__ == "__main__":
    main()
