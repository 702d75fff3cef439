"""The connection to one server: requests with retries, responses as values, errors as Palaver's own types."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast

import httpx
from pydantic import BaseModel, ValidationError

from palaver.client.discovery import is_loopback
from palaver.client.errors import NoServer, ServerFailed, ServerRefused
from palaver.client.proof import Prove, request_hooks
from palaver.client.sse import MEDIA_TYPE, ServerSentEvent, SseDecoder
from palaver.encoding import adapter
from palaver.errors import PalaverError
from palaver.store.errors import Unstorable
from palaver.wire import ErrorBody

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0


class RetryPolicy:
    """Pauses between attempts, with exponential backoff."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the total time without success after which to give up."""
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        self._since = time.monotonic()
        self._pause = FIRST_PAUSE_S

    @property
    def expired(self) -> bool:
        return time.monotonic() - self._since >= self._seconds

    async def pause(self) -> None:
        """With jitter, so that clients do not reconnect at the same time."""
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, MAX_PAUSE_S)


T = TypeVar("T")
Query = Mapping[str, str | int | float | bool | None]
CONNECT_S = 10.0
ANSWER_S = 600.0
"""Requests may wait for a model that is being loaded."""
SILENCE_S = 60.0
"""A stream without data or comments for this time is considered dead; servers send a comment every 15 seconds."""
_UNAVAILABLE = (502, 503, 504)
"""The statuses with which a proxy reports that the server is down."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


class ConnectionLost(Exception):
    """The connection was lost: the request may be retried."""


class ServerConnection:
    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        patience: float = 60.0,
        verify: bool | str | ssl.SSLContext = True,
        transport: httpx.AsyncBaseTransport | None = None,
        prove: Prove | None = None,
    ) -> None:
        """`patience`: for how many seconds to retry when a server that was reachable goes away. `prove` is called for
        each new connection, before anything is sent."""
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
            trust_env=not is_loopback(self.url),  # the environment's proxy does not reach this machine
            event_hooks=request_hooks(prove),
        )

    async def close(self) -> None:
        await self._client.aclose()

    def retry_policy(self) -> RetryPolicy:
        """A server that was never reached is not waited for: the address may be wrong."""
        return RetryPolicy(self._patience if self._reached else 0.0)

    async def get(self, kind: type[T], path: str, **query: str | int | float | bool | None) -> T:
        return parse_response(await self.send("GET", path, query=query, idempotent=True), kind)

    async def post(self, kind: type[T], path: str, body: BaseModel | None = None, *, idempotent: bool = False) -> T:
        return parse_response(await self.send("POST", path, body=body, idempotent=idempotent), kind)

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        content: bytes | None = None,
        media_type: str = "",
        query: Query | None = None,
        idempotent: bool = False,
    ) -> httpx.Response:
        """`idempotent`: whether the request may be sent twice. A request that did not arrive is always sent again."""
        request = self._request(method, path, body, content, media_type, query)
        retry = self.retry_policy()
        while True:
            try:
                response = await self._client.send(request)
            except httpx.TransportError as error:
                if retry.expired or not (idempotent or isinstance(error, _NOT_SENT)):
                    raise NoServer(self.url, _reason(error)) from error
            else:
                self._reached = True
                if response.is_success:
                    return response
                if retry.expired or not (idempotent and _is_unavailable(response)):
                    raise _response_error(response)
            await retry.pause()

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncGenerator[ServerSentEvent]]:
        """The events up to the end of the stream. Raises ConnectionLost, or the error of the server."""
        request = self._request("GET", path, query=query)
        request.headers["accept"] = MEDIA_TYPE
        request.extensions["timeout"] = httpx.Timeout(SILENCE_S, connect=CONNECT_S).as_dict()
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionLost(_reason(error)) from error
        try:
            await self._check(response)
            async with aclosing(_decode_events(response)) as events:
                yield events
        finally:
            await response.aclose()

    async def _check(self, response: httpx.Response) -> None:
        self._reached = True
        if response.is_success:
            return
        try:
            await response.aread()
        except httpx.TransportError as error:
            raise ConnectionLost(_reason(error)) from error
        raise (
            ConnectionLost(f"it answers {response.status_code}")
            if _is_unavailable(response)
            else _response_error(response)
        )

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
        except ValueError as error:  # a lone surrogate in a text
            raise Unstorable(error) from None


def parse_response(response: httpx.Response, kind: type[T]) -> T:
    try:
        value: T = adapter(cast(Any, kind)).validate_json(response.content)
    except ValidationError as error:
        raise _invalid_response(error) from None
    return value


def parse_event(event: ServerSentEvent, kind: Any) -> Any:
    """The event's data as a value. Raises the error if the event is one."""
    try:
        if event.event == "error":
            raise _body_error(ErrorBody.model_validate_json(event.data), 500)
        return adapter(kind).validate_json(event.data)
    except ValidationError as error:
        raise _invalid_response(error) from None


async def _decode_events(response: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
    decoder = SseDecoder()
    try:
        async for chunk in response.aiter_bytes():
            for event in decoder.feed(chunk):
                yield event
    except httpx.TransportError as error:
        raise ConnectionLost(_reason(error)) from error


def _response_error(response: httpx.Response) -> PalaverError:
    body = _parse_error_body(response)
    if body is None:
        message = f"The server answered {response.status_code} {response.reason_phrase}: is this a Palaver server?"
        return _status_error(response.status_code, message)
    return _body_error(body, response.status_code)


def _body_error(body: ErrorBody, status: int) -> PalaverError:
    return body.error.to_value() or _status_error(status, body.error.message)


def _status_error(status: int, message: str) -> PalaverError:
    return ServerFailed(status, message) if status >= 500 else ServerRefused(status, message)


def _is_unavailable(response: httpx.Response) -> bool:
    """Whether a proxy reports that the server is down, or the server that it is shutting down."""
    if response.status_code not in _UNAVAILABLE:
        return False
    body = _parse_error_body(response)
    return body is None or body.error.name == "shutting_down"


def _parse_error_body(response: httpx.Response) -> ErrorBody | None:
    try:
        return ErrorBody.model_validate_json(response.content)
    except ValidationError:
        return None


def _invalid_response(error: ValidationError) -> ServerFailed:
    return ServerFailed(
        200,
        f"The server's answer is not understood ({error.errors()[0]['msg']}). It runs a different version of Palaver.",
    )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
