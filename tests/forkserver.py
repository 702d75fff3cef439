"""Processes for tests that kill them: forked from one that has imported their modules, they start at once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_CONTEXT = multiprocessing.get_context("forkserver")
_modules: list[str] = []


def preload(module: str) -> ForkServerContext:
    """The context of processes that need this module. All of a test run are forked from the same server."""
    _modules.append(module)
    _CONTEXT.set_forkserver_preload(_modules)
    return _CONTEXT
