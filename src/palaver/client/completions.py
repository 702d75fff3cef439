"""Single questions to a server, by its Chat Completions API: nothing is stored.

Starts quickly: it imports neither the store nor the values of `Chat`."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from palaver.client.discovery import is_loopback
from palaver.client.errors import NoServer, ServerFailed, ServerRefused
from palaver.client.proof import Prove, request_hooks
from palaver.client.sse import SseDecoder
from palaver.errors import RequestError

_CONNECT_S = 10.0
_SILENCE_S = 600.0
"""A request may wait for a model that is being loaded."""
_END = "[DONE]"


class CompletionClient:
    """Enter it. Leaving it ends a reply that is still running."""

    def __init__(
        self, url: str, key: str = "", *, verify: bool | ssl.SSLContext = True, prove: Prove | None = None
    ) -> None:
        """`prove` is called for each new connection, before anything is sent."""
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=f"{self.url}/v1/",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            verify=verify,
            trust_env=not is_loopback(self.url),
            event_hooks=request_hooks(prove),
        )

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def models(self) -> tuple[str, ...]:
        """The names of the models that can be asked."""
        try:
            answer = await self._client.get("models")
            await _check_status(answer)
            return tuple(str(model["id"]) for model in answer.json()["data"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoServer(self.url, error or type(error).__name__) from None
        except (ValueError, KeyError, TypeError):
            raise ServerFailed(200, f"The server at {self.url} is not a Palaver server.") from None

    async def stream(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a reply, with their usage at the end."""
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._client.stream("POST", "chat/completions", json=body) as answer:
                await _check_status(answer)
                async with aclosing(_chunks(answer)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except UnicodeEncodeError:
            raise RequestError("A text of the request holds half of a character (a lone surrogate).") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoServer(self.url, error or type(error).__name__) from None


async def _chunks(answer: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    decoder = SseDecoder()
    async for received in answer.aiter_bytes():
        for event in decoder.feed(received):
            if event.data == _END:
                return
            chunk = json.loads(event.data)
            if "error" in chunk:
                raise ServerFailed(answer.status_code, str(chunk["error"].get("message", "The reply failed.")))
            yield chunk
    raise ServerFailed(answer.status_code, "The server ended the reply before its end.")


async def _check_status(answer: httpx.Response) -> None:
    """Raises the server's error in its own words."""
    if answer.is_success:
        return
    await answer.aread()
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server at {answer.url.host} answered with status {answer.status_code}."
    raise (ServerRefused if answer.is_client_error else ServerFailed)(answer.status_code, message)
