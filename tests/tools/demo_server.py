"""The demo server for tests: over stdio, and over HTTP in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palaver.tools.config import ServerConfig


def demo_config(folder: Path) -> ServerConfig:
    return ServerConfig("demo", sys.executable, ("-m", "palaver", "tools", "demo", "--notes", str(folder / "notes")))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serve_demo(folder: Path, port: int | None = None) -> Iterator[str]:
    """Its URL, once it listens."""
    port = port or free_port()
    config = demo_config(folder)
    with subprocess.Popen([config.command, *config.args, "--http", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end and server.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.terminate()
