"""A wire between browser and server that can be cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Wire:
    """Forwards bytes. `cut_streams` cuts event streams after some bytes, so many times; `cut` cuts everything now."""

    def __init__(self, to: int, *, cut_streams: int = 0, after: int = 2000) -> None:
        self._to = to
        self._cuts_left = cut_streams
        self._after = after
        self.cuts = 0
        self.streams = 0
        """Event streams that are open now."""
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.down = False

    def __enter__(self) -> Wire:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _end(one)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.down:
                    near.close()
                    continue
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            near.close()
            return
        with self._lock:
            self._sockets |= {near, far}
        line = _Line()
        up = threading.Thread(target=self._up, args=(near, far, line), daemon=True)
        up.start()
        self._down(far, near, line)
        _end(near)
        _end(far)
        up.join()
        if line.is_stream:
            self.streams -= 1
        with self._lock:
            self._sockets -= {near, far}

    def _up(self, near: socket.socket, far: socket.socket, line: _Line) -> None:
        with suppress(OSError):
            while piece := near.recv(65536):
                if b"/api/events HTTP" in piece and not line.is_stream:
                    line.is_stream = True
                    self.streams += 1
                far.sendall(piece)
        _end(far)

    def _down(self, far: socket.socket, near: socket.socket, line: _Line) -> None:
        with suppress(OSError):
            while piece := far.recv(1024):
                near.sendall(piece)
                line.told += len(piece) if line.is_stream else 0
                if line.told > self._after and self._cuts_left > 0:
                    self._cuts_left -= 1
                    self.cuts += 1
                    return


class _Line:
    is_stream = False
    told = 0


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
