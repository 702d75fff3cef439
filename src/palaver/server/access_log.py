"""The log of requests: who asked for what and how it went, and nothing of what was said unless that is wanted."""

from __future__ import annotations

import logging

from palaver.server.auth import Caller

_MAX_PATH = 200


class AccessLog:
    def __init__(self, debug: bool = False) -> None:
        """`debug`: the log holds what is said."""
        self._debug = debug
        self._access = logging.getLogger("palaver.access")
        self._contents = logging.getLogger("palaver.debug")

    def note(self, id: str, caller: Caller | None, method: str, path: str, status: int, seconds: float) -> None:
        shown = "".join(letter if letter.isprintable() else "�" for letter in path[:_MAX_PATH])
        who = caller.name if caller is not None else "-"
        self._access.info("%s %s %s %s %d %.0f ms", id, who, method, shown, status, seconds * 1000)

    def note_body(self, id: str, body: bytes) -> None:
        if self._debug:
            self._contents.debug("%s asks %s", id, body.decode("utf-8", "replace"))
