"""Processes that run `tests.web.served`, forked from one that has imported it: the imports take most of a start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests import forkserver

ROOT = Path(__file__).parents[2]
_CONTEXT = forkserver.preload("tests.web.served")
HOLD = "\N{DOUBLE VERTICAL LINE}"
"""In a script: a mark at which replies can be held."""
HELD = "held"
"""The file in a server's folder with the number of the first mark at which replies wait."""


def fork_server(arguments: Sequence[str]) -> BaseProcess:
    """Starts a process that serves with these arguments. The first call also starts the process that forks them all."""
    process = _CONTEXT.Process(target=_serve, args=(list(arguments),))
    process.start()
    return process


def _serve(arguments: list[str]) -> None:
    from tests.web import served  # not by the process of the tests

    os.chdir(ROOT)
    served.main(arguments)
