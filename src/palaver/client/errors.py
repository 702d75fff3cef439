"""What can go wrong between a client and its server; all else is raised as the server raised it."""

from __future__ import annotations

from palaver.errors import PalaverError, RequestError


class NoServer(PalaverError):
    def __init__(self, url: str, why: object) -> None:
        super().__init__(f"The server at {url} can't be reached ({why}): is it running?")
        self.url = url


class ServerRefused(RequestError):
    """The server says no, in a way that this program has no type for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerFailed(PalaverError):
    """The server could not do what it should have done."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
