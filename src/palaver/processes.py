"""Helpers for child processes: messages over a socket, descriptors, the end with the parent, and fork servers.

A fork server is a warm process, `python -m MODULE FD`, that does each job in a fork of itself, so that a crash, a hang
or a lack of memory ends only that job."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXIT_SECONDS = 5.0
"""How long a process may take to end after its connection is closed."""
HOST_VARIABLE = "PALAVER_ENGINE_PROCESS"
"""The environment variable with the id of the engine process, for processes that a library starts in it."""
_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")
_NICE = 5


def die_with_parent() -> None:
    """Asks the Linux kernel to kill this process when its parent dies. Elsewhere the closed connection ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def exit_with_host() -> None:
    """Ends this process when the engine process that HOST_VARIABLE names has ended. Called in each process of vLLM."""
    host = int(os.environ.get(HOST_VARIABLE, "0"))
    if not host or host == os.getpid():
        return

    def wait() -> None:
        with suppress(OSError):
            if sys.platform == "linux":
                poll = select.poll()
                poll.register(os.pidfd_open(host), select.POLLIN)
                poll.poll()
            else:
                while True:
                    os.kill(host, 0)
                    time.sleep(1)
        os._exit(0)

    threading.Thread(target=wait, name="palaver-host", daemon=True).start()


def send(connection: socket.socket, message: Any) -> None:
    """Sends a JSON value."""
    data = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receives a JSON value. Raises EOFError if the connection is closed."""
    (size,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    return json.loads(receive_bytes(connection, size))


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """Receives exactly that many bytes. Raises EOFError if the connection is closed before."""
    data = bytearray(size)
    view, received = memoryview(data), 0
    while received < size:
        count = connection.recv_into(view[received:])
        if not count:
            raise EOFError
        received += count
    return data


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    socket.send_fds(connection, [b"\0"], [descriptor])


def receive_descriptor(connection: socket.socket) -> int | None:
    """None if the connection is closed."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return descriptors[0] if data else None


class ForkFailed(Exception):
    """The process of a fork server did not start a job: the message says why."""


class ForkServerClosed(ForkFailed):
    pass


class ForkServer:
    """The parent's side of a fork server. The first job starts the process, and so does the next one after its death.
    Jobs run in parallel."""

    def __init__(self, module: str, start_seconds: float, first_message: Callable[[], Any] | None = None) -> None:
        """`start_seconds`: how long a fork may take to start. `first_message`: is sent to a new process."""
        self._module = module
        self._start_seconds = start_seconds
        self._first_message = first_message
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process unless it runs."""
        with self._lock:
            self._ensure_started()

    @contextmanager
    def fork(self, *messages: Any) -> Iterator[socket.socket]:
        """The connection to a new fork, for one job. The process receives the messages before it forks. Raises
        ForkFailed."""
        parent_end, child_end = socket.socketpair()
        with parent_end:
            with child_end, self._lock:
                connection = self._ensure_started()
                try:
                    send_descriptor(connection, child_end.fileno())
                    for message in messages:
                        send(connection, message)
                except OSError as error:
                    raise ForkFailed("ended") from error
            parent_end.settimeout(self._start_seconds)
            try:
                receive(parent_end)
            except (EOFError, OSError) as error:
                raise ForkFailed("did not answer") from error
            yield parent_end

    def close(self) -> None:
        """Ends the process. Running jobs fail."""
        with self._lock:
            self._closed = True
            self._stop()

    def _ensure_started(self) -> socket.socket:
        if self._closed:
            raise ForkServerClosed("was closed")
        if self._connection is not None and self.process is not None and self.process.poll() is None:
            return self._connection
        self._stop()
        parent_end, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-m", self._module, str(child_end.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL)
        self._connection = parent_end
        parent_end.settimeout(self._start_seconds)
        if self._first_message is not None:
            try:
                send(parent_end, self._first_message())
            except OSError as error:
                raise ForkFailed("did not start") from error
        return parent_end

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self.process is not None:
            try:
                self.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


def ignore_key_signals() -> None:
    r"""Leaves Ctrl+C and Ctrl+\ to the front-end: the terminal sends their signals to all processes of a command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)


def parent_connection() -> socket.socket:
    """The connection of a fork server's process to its parent."""
    ignore_key_signals()
    return socket.socket(fileno=int(sys.argv[1]))


def serve_forks(
    connection: socket.socket, run: Callable[[socket.socket], None], prepare: Callable[[], object] | None = None
) -> None:
    """The process of a fork server: calls `prepare`, and then `run` in a fork, for each job until the parent is gone.
    `run` must call `limit_fork`, and end the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    gc.freeze()
    while (descriptor := receive_descriptor(connection)) is not None:
        if prepare is not None:
            prepare()
        if os.fork() == 0:
            connection.close()
            run(socket.socket(fileno=descriptor))
        os.close(descriptor)


def limit_fork(
    connection: socket.socket,
    cpu_seconds: int,
    wall_seconds: float,
    memory_bytes: int,
) -> None:
    """Limits the calling fork, which can write no files then, and tells the parent that it has started. The kernel
    ends it at its limits. `memory_bytes`: what it may take beyond what it starts with."""
    import resource  # not every system has it

    die_with_parent()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)  # hides the output of a crash
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        limit = int(statistics.read_text().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)  # the default action of SIGALRM ends the process
    send(connection, "started")
