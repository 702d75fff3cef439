"""Processes that run `tests.web.served`, forked from one that has imported it: the imports take most of a start."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRELOADED = ["tests.web.served"]
HOLD = "\N{DOUBLE VERTICAL LINE}"
"""In a script: a mark at which replies can be held."""
HELD = "held"
"""The file in a server's folder with the number of the first mark at which replies wait."""


def fork_server(arguments: Sequence[str]) -> BaseProcess:
    """Starts a process that serves with these arguments. The first call also starts the process that forks them all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
        forkserver.ensure_running()
    process = context.Process(target=_serve, args=(list(arguments),))
    process.start()
    return process


def _serve(arguments: list[str]) -> None:
    from tests.web import served  # not by the process of the tests

    os.chdir(ROOT)
    served.main(arguments)
