"""The team of threads that computes the tasks of a compiled step's pass."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import palaver.engines.compiled
from tests.engines.compiler import needs_a_compiler

HEADERS = Path(palaver.engines.compiled.__file__).parent
TRIALS = Path(__file__).with_name("thread_team.c")


@needs_a_compiler
@pytest.mark.parametrize("trial", ["sleep", "share"])
def test_threads_share_each_phase(trial: str, tmp_path: Path) -> None:
    program = tmp_path / "thread_team"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    flags = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")
    subprocess.run([compiler, *flags, f"-I{HEADERS}", "-o", program, TRIALS], check=True)
    assert subprocess.run([program, trial]).returncode == 0
