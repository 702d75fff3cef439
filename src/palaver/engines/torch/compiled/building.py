"""From step.c to a library in the user's cache, built once for each machine and compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

from palaver.errors import CantCompile

SOURCE = Path(__file__).with_name("step.c")
BUILD_SECONDS = 120
BASE = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC")
TRIES = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
"""The best first: not every compiler knows its machine by the same name, and not every one has threads."""


def load_library() -> ctypes.CDLL:
    """The compiled code. Raises CantCompile, which says what is missing."""
    compiler = _compiler()
    path = _cached(compiler)
    if not path.exists():
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CantCompile(
            f"what was compiled can't be loaded ({error}); delete {path} to have it built anew"
        ) from error


def _compiler() -> str:
    wanted = os.environ.get("CC", "").split()
    for name in (*wanted[:1], "cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    raise CantCompile("there is no C compiler here; install gcc or clang")


def _cached(compiler: str) -> Path:
    """Named by everything the result depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS).stdout
    parts = (SOURCE.read_text("utf-8"), compiler, version, platform.machine(), _processor(), repr((BASE, TRIES)))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return user_cache_path("palaver") / "compiled" / f"step-{name}.so"


def _processor() -> str:
    """What the processor can do: a cache may be shared by machines."""
    if sys.platform != "linux":
        return platform.processor()
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(compiler: str, path: Path) -> None:
    said = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            out = Path(folder) / path.name
            for flags in TRIES:
                command = [compiler, *BASE, *flags, str(SOURCE), "-o", str(out), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
                if done.returncode == 0:
                    out.replace(path)  # whole or not at all, whoever else builds it now
                    return
                said = said or done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CantCompile(str(error)) from error
    raise CantCompile(f"{Path(compiler).name} can't compile it: {said.strip()[-400:]}")
