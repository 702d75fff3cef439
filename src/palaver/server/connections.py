"""Connections that must come to the point: a request's head arrives whole within a time and a size, or not at all.

Without this a client could hold connections for ever by sending nothing, or its headers a letter at a time, before
any of our code is asked.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from palaver.server.settings import Limits


def prompt_connections(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol of connections under these limits, for uvicorn."""

    class Connection(HttpToolsProtocol):
        _clock: asyncio.TimerHandle | None = None
        _begun = 0
        """Bytes of a head that is not whole yet."""
        _in_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            in_body = self._in_body
            super().data_received(data)
            if not self._is_idle:
                self._stop_waiting()
                return
            self._begun += 0 if in_body or self._in_body else len(data)
            if self._begun > limits.head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The request's headers are too large.")
            else:
                self._wait()

        def on_headers_complete(self) -> None:
            self._in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

        @property
        def _is_idle(self) -> bool:
            """Whether nothing is asked, or what was asked is answered, if only by a refusal to read on."""
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return False
            return self.cycle is None or self.cycle.response_complete

        def _wait(self) -> None:
            if self._clock is None:
                self._clock = self.loop.call_later(limits.head_seconds, self._too_late)

        def _stop_waiting(self) -> None:
            self._begun = 0
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

        def _too_late(self) -> None:
            self._clock = None
            if self._is_idle and self._begun:
                why = f"The request's headers did not arrive within {limits.head_seconds:g} s."
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, why)
            elif self._is_idle:  # nothing was said, or only the rest of what is answered already
                self.transport.close()

        def _refuse(self, status: HTTPStatus, why: str) -> None:
            self._stop_waiting()
            error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return Connection
