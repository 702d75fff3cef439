"""The sandbox's process: `python -m palaver.engines.grammars.trial FD`.

It imports the library and reads the vocabulary once. Each grammar is then compiled, and its first masks computed, in a
fork that the kernel ends at its limits on time, memory and stack.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from palaver.constraints import Constraint
from palaver.engines.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarError, first_line
from palaver.engines.grammars.sandbox import WALL_SECONDS, unpack_constraint
from palaver.processes import die_with_parent, receive, receive_descriptor, send

CPU_SECONDS = 2
MEMORY_BYTES = 512 << 20
"""Memory that a fork may take beyond what it starts with."""
STACK_BYTES = 2 << 20
"""A small part of the stack of the engine's compiler threads, so that a grammar that passes here is safe there."""
MASK_COUNT = 4
MASK_SECONDS = 0.25
"""CPU time of one mask. The engine computes a mask for every token, and all requests wait for it."""
_NICE = 5


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    connection = socket.socket(fileno=int(sys.argv[1]))
    vocabulary = [token.encode("latin-1") for token in receive(connection)]
    compiler = GrammarCompiler(vocabulary)
    compiler.tokenizer(())
    gc.freeze()
    while (descriptor := receive_descriptor(connection)) is not None:
        compiler.tokenizer(tuple(receive(connection)))
        if os.fork() == 0:
            connection.close()
            _check_in_fork(socket.socket(fileno=descriptor), compiler)
        os.close(descriptor)


def _check_in_fork(connection: socket.socket, compiler: GrammarCompiler) -> None:
    """Runs in the fork. Sends the result, unless a limit is exceeded, and ends the process."""
    _set_limits()
    send(connection, "started")
    constraint = unpack_constraint(receive(connection))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: send(connection, {"why": rejection_reason(compiler, constraint)}))
    thread.start()
    thread.join()
    os._exit(0)


def _set_limits() -> None:
    die_with_parent()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())  # hides the output of a crash
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        limit = int(statistics.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)  # the default action of SIGALRM ends the process


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
