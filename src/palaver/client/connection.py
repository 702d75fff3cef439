"""Requests to one server: sent, sent again where that is harmless, and answered with values or with our errors."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from palaver.errors import PalaverError, RequestError
from palaver.store.errors import Unstorable
from palaver.wire.errors import ErrorBody
from palaver.wire.sse import MEDIA_TYPE, Decoder, Sent


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


FIRST_S = 0.05
LONGEST_S = 5.0


class RetryPolicy:
    """Pauses between attempts. Whatever works makes it new."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for how long in all it is tried without success."""
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._since = time.monotonic()
        self._pause = FIRST_S

    @property
    def over(self) -> bool:
        return time.monotonic() - self._since >= self._seconds

    async def pause(self) -> None:
        """Not all clients of a server that comes back come at once."""
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, LONGEST_S)


T = TypeVar("T")
Query = Mapping[str, str | int | float | bool | None]
CONNECT_S = 10.0
ANSWER_S = 600.0
"""A message may wait for a model that is being loaded."""
SILENCE_S = 60.0
"""After so long without even a comment a stream is taken for dead; servers send one every quarter of a minute."""
_AWAY = (502, 503, 504)
"""What a proxy says while the server behind it is away."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


class ConnectionLost(Exception):
    """The line to the server is cut: it may be tried again."""


class Connection:
    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        patience: float = 60.0,
        verify: bool | str | ssl.SSLContext = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`patience`: for how many seconds a server that was there is waited for when it goes away."""
        self.url = url.rstrip("/")
        self._patience = patience
        self._reached = False
        self._client = httpx.AsyncClient(
            base_url=f"{self.url}/api/",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            verify=verify,
            transport=transport,
            trust_env=not _is_near(self.url),  # a proxy of the surroundings is no way to one's own machine
        )

    async def close(self) -> None:
        await self._client.aclose()

    def patience(self) -> RetryPolicy:
        """A server that was never there is not waited for: the address may be wrong."""
        return RetryPolicy(self._patience if self._reached else 0.0)

    async def get(self, kind: type[T], path: str, **query: str | int | float | bool | None) -> T:
        return parse_response(await self.send("GET", path, query=query, again=True), kind)

    async def post(self, kind: type[T], path: str, body: BaseModel | None = None, *, again: bool = False) -> T:
        return parse_response(await self.send("POST", path, body=body, again=again), kind)

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        content: bytes | None = None,
        media_type: str = "",
        query: Query | None = None,
        again: bool = False,
    ) -> httpx.Response:
        """`again`: whether it may be sent twice without harm. What never arrived is always sent again."""
        request = self._request(method, path, body, content, media_type, query)
        patience = self.patience()
        while True:
            try:
                answer = await self._client.send(request)
            except httpx.TransportError as error:
                if patience.over or not (again or isinstance(error, _NOT_SENT)):
                    raise NoServer(self.url, _why(error)) from error
            else:
                self._reached = True
                if answer.is_success:
                    return answer
                if patience.over or not (again and _is_away(answer)):
                    raise _refusal(answer)
            await patience.pause()

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncGenerator[Sent]]:
        """What is sent until the line is cut or the server ends it. Raises Cut, or what the server refuses it with."""
        request = self._request("GET", path, query=query)
        request.headers["accept"] = MEDIA_TYPE
        request.extensions["timeout"] = httpx.Timeout(SILENCE_S, connect=CONNECT_S).as_dict()
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionLost(_why(error)) from error
        try:
            await self._check(answer)
            async with aclosing(_sent(answer)) as sent:
                yield sent
        finally:
            await answer.aclose()

    async def _check(self, answer: httpx.Response) -> None:
        self._reached = True
        if answer.is_success:
            return
        try:
            await answer.aread()
        except httpx.TransportError as error:
            raise ConnectionLost(_why(error)) from error
        raise ConnectionLost(f"it answers {answer.status_code}") if _is_away(answer) else _refusal(answer)

    def _request(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        content: bytes | None = None,
        media_type: str = "",
        query: Query | None = None,
    ) -> httpx.Request:
        params = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            if body is not None:
                content, media_type = body.model_dump_json(exclude_unset=True).encode(), "application/json"
            headers = {"content-type": media_type} if content is not None else {}
            return self._client.build_request(method, path, content=content, headers=headers, params=params)
        except ValueError as error:  # half of a character somewhere in a text
            raise Unstorable(error) from None


def parse_response(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return TypeAdapter(kind).validate_json(answer.content)
    except ValidationError as error:
        raise _unreadable(error) from None


def parse_event(sent: Sent, kind: Any) -> Any:
    """The data as a value. Raises the error that it may be instead."""
    try:
        if sent.event == "error":
            raise _error(ErrorBody.model_validate_json(sent.data), 500)
        return TypeAdapter(kind).validate_json(sent.data)
    except ValidationError as error:
        raise _unreadable(error) from None


async def _sent(answer: httpx.Response) -> AsyncGenerator[Sent]:
    decoder = Decoder()
    try:
        async for chunk in answer.aiter_bytes():
            for sent in decoder.feed(chunk):
                yield sent
    except httpx.TransportError as error:
        raise ConnectionLost(_why(error)) from error


def _refusal(answer: httpx.Response) -> PalaverError:
    body = _body(answer)
    if body is None:
        message = f"The server answered {answer.status_code} {answer.reason_phrase}: is this a Palaver server?"
        return _by_status(answer.status_code, message)
    return _error(body, answer.status_code)


def _error(body: ErrorBody, status: int) -> PalaverError:
    return body.error.value() or _by_status(status, body.error.message)


def _by_status(status: int, message: str) -> PalaverError:
    return ServerFailed(status, message) if status >= 500 else ServerRefused(status, message)


def _is_away(answer: httpx.Response) -> bool:
    """Whether somebody on the way says that the server isn't there; or it says so itself, going down."""
    if answer.status_code not in _AWAY:
        return False
    body = _body(answer)
    return body is None or body.error.name == "shutting_down"


def _body(answer: httpx.Response) -> ErrorBody | None:
    try:
        return ErrorBody.model_validate_json(answer.content)
    except ValidationError:
        return None


def _unreadable(error: ValidationError) -> ServerFailed:
    return ServerFailed(
        200, f"The server's answer is not understood ({error.errors()[0]['msg']}): is it of another age?"
    )


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_near(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def leaf_certificate(chain: Path) -> str:
    """The server's own certificate of a file, which may hold those of who signed it, and even its key, too."""
    found = _CERTIFICATE.search(chain.read_text(encoding="ascii", errors="replace"))
    return found[0] + "\n" if found else ""


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Talks to whoever has the key of this very certificate, and to nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is known by its key: its names may be those of another place
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context
