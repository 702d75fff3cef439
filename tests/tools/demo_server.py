"""The servers of tests in processes of their own: the demo over stdio and over HTTP, the misbehaving one over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palaver.tools.config import ServerConfig
from tests.tools import misbehaving_server


def demo_config(folder: Path) -> ServerConfig:
    return ServerConfig("demo", sys.executable, ("-m", "palaver", "tools", "demo", "--notes", str(folder / "notes")))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serve_demo(folder: Path, port: int | None = None) -> Iterator[str]:
    """Its URL, once it listens."""
    port, config = port or free_port(), demo_config(folder)
    with serve([config.command, *config.args, "--http", str(port)], port):
        yield f"http://127.0.0.1:{port}/mcp"


@contextmanager
def serve_misbehaving(record: Path, port: int | None = None) -> Iterator[str]:
    port = port or free_port()
    with serve([sys.executable, misbehaving_server.__file__, "", str(record), str(port)], port):
        yield f"http://127.0.0.1:{port}/mcp"


@contextmanager
def serve(command: list[str], port: int) -> Iterator[None]:
    """Runs a server until the block ends, which begins once it listens."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end and server.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield
        finally:
            server.kill()
