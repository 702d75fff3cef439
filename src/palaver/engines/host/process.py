"""Starts an engine process. This module imports little, so that the process can start before its parent is ready."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

FOREIGN_VARIABLE = "PALAVER_FOREIGN_PYTHON"
"""Set in the environment of a process that runs under the Python of another environment."""
OLDEST_PYTHON = (3, 11)
VLLM_PACKAGES = ("vllm", "torch", "pydantic", "numpy", "cachetools", "llguidance", "typing_extensions")
"""What the engine imports in the environment of --engine-python. vLLM depends on all of it."""
_LENGTHS = struct.Struct("!II")
"""As in `frames`, which can't be imported where packages are missing."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
_SPINS, _LLAMACPP_SPINS = "20000", "2000"
_THREAD_DEFAULTS = {SPIN_VARIABLE: _SPINS}
"""OpenMP threads spin for about a millisecond while they wait for the next pass. By default they spin much longer and
keep the event loops, which deliver the tokens, from their cores."""
_METADATA = "Metadata-Version: 2.1\nName: palaver-engine\nVersion: 0\n"
_PLUGIN = "[vllm.general_plugins]\npalaver = palaver.processes:exit_with_host\n"
"""vLLM calls it in each of its processes: otherwise they would outlive an engine process that is killed."""


def environment() -> dict[str, str]:
    """The environment of the process: libraries read it when they load. The user's own settings take precedence."""
    return _THREAD_DEFAULTS | os.environ


def shorten_waits() -> None:
    """Call in the process before llama.cpp is loaded. Its threads wait for each other hundreds of times in a pass, for
    some microseconds where each has a core. Where they don't, a long wait is in vain that often."""
    if os.environ.get(SPIN_VARIABLE) == _SPINS:
        os.environ[SPIN_VARIABLE] = _LLAMACPP_SPINS


def check_foreign_python(descriptor: int) -> None:
    """Ends a process whose Python can't run an engine: tells the supervisor the reason in one frame."""
    if FOREIGN_VARIABLE not in os.environ:
        return
    where = f"The Python of the engine ({sys.executable})"
    missing = [name for name in VLLM_PACKAGES if find_spec(name) is None]
    if sys.version_info[:2] < OLDEST_PYTHON:
        reason = f"{where} is version {platform.python_version()}: at least 3.11 is needed."
    elif missing:
        install = "install vLLM there (pip install vllm), or name a Python that has it with --engine-python"
        reason = f"{where} has no {', '.join(missing)}: {install}."
    else:
        return
    error = {"type": "error", "name": "broken_model", "message": reason, "details": {}}
    data = json.dumps({"failed": error}).encode()
    with socket.socket(fileno=descriptor) as connection:
        connection.sendall(_LENGTHS.pack(len(data), 0) + data)
    os._exit(1)


class ChildProcess:
    """A started engine process. It imports what every engine needs, and waits for the spec of its engine.

    Start it in a thread that lives as long as the process: on Linux it dies with that thread. Leaving its context kills
    it, unless a supervisor has connected to it.
    """

    def __init__(self, gguf: Path | None = None, python: Path | None = None) -> None:
        """`gguf`: a file whose weights it loads while it waits. `python`: that of another environment; of Palaver's own
        it then gets this package alone. Raises OSError if the process can't be started."""
        self.python = python
        self._connection, child_end = socket.socketpair()
        self._stderr, writable = os.pipe()
        self._connected = False
        self._folder = None if python is None else _link_package()
        variables = environment()
        if self._folder is not None:
            variables[FOREIGN_VARIABLE] = "1"
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (self._folder, os.environ.get("PYTHONPATH"))))
        command = [str(python or sys.executable), "-m", "palaver.engines.host", str(child_end.fileno())]
        command += [] if gguf is None else [str(gguf)]
        try:
            self.popen = subprocess.Popen(
                command,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=None if python is None else writable,  # such libraries print there
                stderr=writable,
                env=variables,
            )
        except OSError:
            self._close()
            raise
        finally:
            child_end.close()
            os.close(writable)

    def connect(self) -> tuple[socket.socket, int]:
        """The connection and the descriptor of the process's stderr. Both belong to the caller, as does the process."""
        assert not self._connected
        self._connected = True
        return self._connection, self._stderr

    def remove_files(self) -> None:
        """Call when the process has ended."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self._connected:
            return
        self._close()
        self.popen.kill()
        self.popen.wait()

    def _close(self) -> None:
        self._connection.close()
        os.close(self._stderr)
        self.remove_files()


def _link_package() -> str:
    """A folder for PYTHONPATH with this package alone: what else is installed beside it is for another Python."""
    folder = Path(tempfile.mkdtemp(prefix="palaver-engine-"))
    package = Path(__file__).resolve().parents[2]
    (folder / package.name).symlink_to(package, target_is_directory=True)
    plugin = folder / "palaver_engine-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text(_METADATA)
    (plugin / "entry_points.txt").write_text(_PLUGIN)
    return str(folder)
