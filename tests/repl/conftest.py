"""Fixtures that run the terminal with a local model and with a live server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repl.terminal import Terminal

SOURCE = Path(__file__).parents[2] / "src"
SLOW_STEPS = Path(__file__).parent / "slow_steps"


@dataclass(frozen=True)
class Door:
    """How the program reaches its conversations: a data folder and command line arguments."""

    name: str
    folder: Path
    arguments: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{SLOW_STEPS}{os.pathsep}{SOURCE}",
            "ENGINE_CRAWLS_WHILE": str(self._crawls),
        }

    @property
    def _crawls(self) -> Path:
        return self.folder / "crawls"

    @contextmanager
    def crawling(self) -> Iterator[None]:
        """After its first words, or in a long prompt, makes a reply so slow that it still runs when a key or a signal
        comes."""
        self._crawls.touch()
        try:
            yield
        finally:
            self._crawls.unlink()

    def open(
        self,
        *arguments: str,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> Terminal:
        command = [sys.executable, "-m", "palaver", "chat", *self.arguments, *arguments]
        return Terminal(command, columns, rows, {**self.environment, **(environment or {})}, echo)


class HeldEngine:
    """Holds the engine's process of a program that is opened with `environment`: its model loads until `release`."""

    def __init__(self, folder: Path) -> None:
        self._released = folder / "released"
        self.environment = {"ENGINE_HELD_UNTIL": str(self._released)}

    def release(self) -> None:
        self._released.touch()


def local_door(folder: Path) -> Door:
    return Door("local", folder, ("--local", "--data", str(folder)))


@pytest.fixture(scope="session", params=["local", "server"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Door:
    if request.param == "local":
        return local_door(tmp_path_factory.mktemp("local"))
    found: Door = request.getfixturevalue("server")
    return found


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with run_server(tmp_path_factory.mktemp("server")) as (door, _):
        yield door


@contextmanager
def run_server(folder: Path, *options: str) -> Iterator[tuple[Door, subprocess.Popen[bytes]]]:
    """A live server on that folder; terminated at the end unless the test has done so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    door = Door("server", folder, ("--server", url, "--data", str(folder)))
    command = [sys.executable, "-m", "palaver", "serve", "--port", str(port), "--data", str(folder), *options]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **door.environment}, stdout=log, stderr=log)
    try:
        _wait_until_ready(url, process, folder / "server.log")
        yield door, process
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise AssertionError(f"the server never answered:\n{log.read_text()}")


@pytest.fixture(scope="module")
def terminal(door: Door) -> Iterator[Terminal]:
    """One program for many tests; each starts a new conversation."""
    with door.open("--set", "seed=1") as terminal:
        terminal.wait(" is ready · ")
        terminal.prompt()
        terminal.do("/preset save fresh")
        yield terminal
