"""`/copy` with programs of the desktop. Fake ones stand for them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.repl.scripted_session import PLAIN, open_session

ANSWER = "Just an answer."


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which programs are found first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


async def test_a_program_that_stays_in_the_background(tmp_path: Path, programs: Path) -> None:
    """As wl-copy and xclip do, it leaves a process with the streams that it inherits. Other tasks run meanwhile."""
    copied, gate, pid = tmp_path / "copied", tmp_path / "gate", tmp_path / "pid"
    os.mkfifo(gate)
    write_program(programs / "wl-copy", f"cat > {copied}\nread line < {gate}\nsleep 600 &\necho $! > {pid}")
    async with open_session(tmp_path / "data", PLAIN) as session:
        await session.do("Hello")
        copying = asyncio.create_task(session.do("/copy"))
        with await asyncio.to_thread(gate.open, "w") as opened:
            opened.write("go\n")
        try:
            assert await copying == f"Copied {len(ANSWER)} characters (wl-copy)."
            assert copied.read_text() == ANSWER
        finally:
            os.kill(int(pid.read_text()), signal.SIGTERM)


async def test_the_next_program_copies_where_one_hangs(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def run_shortly(command: Sequence[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """The limit is short for the program that hangs, and there is none for the other."""
        return run(command, timeout=0.01 if command[0] == "wl-copy" else None, **options)

    monkeypatch.setattr(subprocess, "run", run_shortly)
    copied = tmp_path / "copied"
    write_program(programs / "wl-copy", "exec sleep 600")
    write_program(programs / "xclip", f"cat > {copied}")
    async with open_session(tmp_path / "data", PLAIN) as session:
        await session.do("Hello")
        assert await session.do("/copy") == f"Copied {len(ANSWER)} characters (xclip)."
        assert copied.read_text() == ANSWER
