"""Connections that must come to the point: a request's head arrives whole within a time and a size, or not at all.

Without this a client could hold connections for ever by sending nothing, or its headers a letter at a time, before
any of our code is asked."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from palaver.server.settings import ServerLimits

LINGER_SECONDS = 2.0
"""For so long what still comes is discarded after a refusal: closing at once would make the system drop our answer."""


class HeadersTooLarge(Exception):
    """Ends the parsing of a request."""


def limited_protocol(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """The protocol of connections under these limits, for uvicorn."""

    class Connection(HttpToolsProtocol):
        _clock: asyncio.TimerHandle | None = None
        _begun = 0
        """Bytes of a head that is not whole yet."""
        _in_body = False
        _head_size = 0
        """Bytes of the line and the headers (and trailers) of the request that is being read."""
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            in_body = self._in_body
            super().data_received(data)
            if self._refused:
                return
            if not self._is_idle:
                self._stop_waiting()
                return
            self._begun += 0 if in_body or self._in_body else len(data)
            if self._begun > limits.head_bytes:
                self._refuse_headers()
            else:
                self._wait()

        def on_message_begin(self) -> None:
            self._head_size = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + len(b": \r\n"))
            super().on_header(name, value)

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
            """Called for whatever the parser can't go on with."""
            if self._head_size > limits.head_bytes:
                self._refuse_headers()
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, msg)

        def _count(self, size: int) -> None:
            self._head_size += size
            if self._head_size > limits.head_bytes:
                raise HeadersTooLarge

        def _refuse_headers(self) -> None:
            why = f"The request's headers are larger than {limits.head_bytes} bytes."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, why)

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
            self._refused = True
            error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._clock = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    return Connection
