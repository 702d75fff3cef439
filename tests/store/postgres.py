"""A real PostgreSQL server in a folder of its own, for the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL


def server_binaries() -> Path | None:
    """The folder of the newest installed server."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


@contextmanager
def running_server(binaries: Path, fsync: bool = False) -> Iterator[URL]:
    """The URL of its administrative database; the server ends with the block. `fsync`: it syncs, as servers do."""
    folder = Path(tempfile.mkdtemp(prefix="palaver-pg-"))
    account = server_account()
    if account is not None:
        shutil.chown(folder, account)
    try:
        _run(binaries / "initdb", account, "-D", folder / "data", "-A", "trust", "-U", "test", "-E", "UTF8", "-N")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c max_connections=50"
        options += "" if fsync else " -c fsync=off"
        control = (binaries / "pg_ctl", account, "-D", folder / "data", "-w", "-l", folder / "log")
        _run(*control, "-o", options, "start")
        try:
            yield URL.create("postgresql", username="test", database="postgres", query={"host": str(folder)})
        finally:
            _run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def restart_server(url: URL) -> None:
    """Ends the server at once, as kill -9 does, and starts it again: connections break, unsynced commits are lost."""
    binaries = server_binaries()
    assert binaries is not None
    folder = Path(str(url.query["host"]))
    _run(binaries / "pg_ctl", server_account(), "-D", folder / "data", "-w", "-m", "immediate", "restart")


def server_account() -> str | None:
    """The server refuses to run as root: then it runs as somebody else."""
    if os.getuid() != 0:
        return None
    names = [entry.pw_name for entry in pwd.getpwall()]
    return "postgres" if "postgres" in names else "nobody"


def _run(program: Path, account: str | None, *arguments: object) -> None:
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(
        command,
        user=account,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={"LC_ALL": "C.UTF-8", "PATH": "/bin"},
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
