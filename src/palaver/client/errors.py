"""Errors of clients: a server that is not there, or refuses or fails a request."""

from __future__ import annotations

from palaver.errors import PalaverError, RequestError


class NoServer(PalaverError):
    def __init__(self, url: str, why: object) -> None:
        super().__init__(f"The server at {url} can't be reached ({why}): is it running?")
        self.url = url


class ServerRefused(RequestError):
    """The server refused the request with an error that this program has no type for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerFailed(PalaverError):
    """The server failed to process the request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
