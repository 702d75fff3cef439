"""Servers that take token ids: vLLM's `/inference/v1/generate` and llama.cpp's `/completion`."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import httpx

from palaver.engines.core.token_stream import StreamLost, TokenRequest
from palaver.engines.vllm.sampling_params import MAX_TEMPERATURE, native_parameters
from palaver.errors import BrokenModel, EngineError, RequestError
from palaver.generation import NO_LOGPROB, Alternative, Prefilled, Step

CONNECT_S = 5.0
SILENCE_S = 120.0
"""How long a server may send nothing, for a long prompt or a long queue."""
MAX_REASON = 300
BUSY = (429, 502, 503, 504)
"""Statuses of a server that starts, or has too much to do: the request is sent again."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    model: str
    context_length: int
    build: str
    isolates_owners: bool
    """Whether its cache of prompts has a salt."""
    end_id: int | None = None
    """The token that ended a reply, where the server does not send it."""


class TokenServer(Protocol):
    url: str
    max_temperature: float
    """The highest that its sampler takes."""

    async def describe(self) -> ServerFacts:
        """Raises BrokenModel if it can't be reached or takes no token ids."""
        ...

    async def tokenize(self, text: str) -> list[int]: ...

    def stream(self, request: TokenRequest, facts: ServerFacts) -> AsyncGenerator[Prefilled | Step]:
        """As in `TokenBackend`."""
        ...

    async def close(self) -> None: ...


class _HttpServer:
    headers: Mapping[str, str] = {}
    max_temperature = math.inf

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        headers = self.headers if key is None else {**self.headers, "Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """One answer. Raises BrokenModel: it is for the start."""
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise BrokenModel(f"The server at {self.url} can't be reached: {_reason(error)}.") from error
        if response.status_code in (401, 403):
            raise BrokenModel(f"The server at {self.url} wants a key, or another one: set PALAVER_ENGINE_KEY.")
        if response.is_error:
            raise BrokenModel(f"The server at {self.url} answers {path} with status {response.status_code}.")
        return _parse(response.text, self.url)

    @asynccontextmanager
    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a streamed answer. Leaving the context closes the connection, which aborts the request."""
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    raise _refusal(self.url, response.status_code, (await response.aread()).decode(errors="replace"))
                yield self._read(response)
        except httpx.HTTPError as error:
            raise StreamLost(f"The connection to the server at {self.url} broke ({_reason(error)}).") from error

    async def _read(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            if line.startswith("data: [DONE]"):
                return
            if line.startswith(("data: ", "error: ")):
                event = _parse(line.partition(": ")[2], self.url)
                if "error" in event or line.startswith("error"):
                    raise EngineError(f"The server at {self.url} failed: {_message(event)}.")
                yield event


class VllmServer(_HttpServer):
    """vLLM's own server. Its model is the first that it lists."""

    max_temperature = MAX_TEMPERATURE
    _model = ""

    async def describe(self) -> ServerFacts:
        models = (await self._get("/v1/models"))["data"]
        if not models or not isinstance(models[0].get("max_model_len"), int):
            raise BrokenModel(f"The server at {self.url} is not vLLM's: it does not say how long its context is.")
        paths = (await self._get("/openapi.json")).get("paths", {})
        if "/inference/v1/generate" not in paths:
            raise BrokenModel(f"The server at {self.url} takes no token ids: start it with --enable-scale-out.")
        build = str((await self._get("/version")).get("version", "unknown"))
        self._model = models[0]["id"]
        return ServerFacts(self._model, models[0]["max_model_len"], build, isolates_owners=True)

    async def tokenize(self, text: str) -> list[int]:
        answer = await self._ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(token_id) for token_id in answer["tokens"]]

    async def stream(self, request: TokenRequest, facts: ServerFacts) -> AsyncGenerator[Prefilled | Step]:
        parameters = {name: value for name, value in native_parameters(request).items() if value is not None}
        body = {
            "model": facts.model,
            "token_ids": request.token_ids,
            "sampling_params": parameters,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": sha256(request.salt.encode()).hexdigest(),
        }
        async with self._events("/inference/v1/generate", body) as events:
            first = True
            async for event in events:
                if first:
                    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                    yield Prefilled(len(request.prompt), details.get("cached_tokens") or 0)
                    first = False
                for choice in event.get("choices", ()):
                    for step in _vllm_steps(choice, request):
                        yield step


def _vllm_steps(choice: Mapping[str, Any], request: TokenRequest) -> list[Step]:
    ids = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or [None] * len(ids)
    steps = []
    for token_id, entry in zip(ids, content, strict=True):
        own = NO_LOGPROB if entry is None else float(entry["logprob"])
        found = () if entry is None else entry.get("top_logprobs") or ()
        best = sorted(found, key=lambda one: -float(one["logprob"]))[: request.sampling.logprobs]
        steps.append(
            Step(token_id, own, tuple(Alternative(int(one["token_id"]), float(one["logprob"])) for one in best))
        )
    return steps


class LlamaServer(_HttpServer):
    """The server of llama.cpp. It shares cached prompts between all of its clients."""

    headers: Mapping[str, str] = {"Connection": "close"}  # it closes connections after a stream in any case

    async def describe(self) -> ServerFacts:
        facts = await self._get("/props")
        settings = facts.get("default_generation_settings") or {}
        context = settings.get("n_ctx")
        if not isinstance(context, int) or context <= 0:
            raise BrokenModel(f"The server at {self.url} is not llama.cpp's: it does not say how long its context is.")
        name = str(facts.get("model_alias") or facts.get("model_path") or "model")
        build = str(facts.get("build_info") or "unknown")
        end = await self._ask("POST", "/tokenize", {"content": facts.get("eos_token") or "", "parse_special": True})
        ends = end.get("tokens") or [None]
        return ServerFacts(name, context, build, isolates_owners=False, end_id=ends[0])

    async def tokenize(self, text: str) -> list[int]:
        answer = await self._ask("POST", "/tokenize", {"content": text, "add_special": False})
        return [int(token_id) for token_id in answer["tokens"]]

    async def stream(self, request: TokenRequest, facts: ServerFacts) -> AsyncGenerator[Prefilled | Step]:
        native = native_parameters(request)
        biases = native["logit_bias"] or {}
        body = {
            "prompt": request.token_ids,
            "n_predict": request.max_tokens,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            "temperature": native["temperature"],
            "top_k": native["top_k"],
            "top_p": native["top_p"],
            "min_p": native["min_p"],
            "repeat_penalty": native["repetition_penalty"],
            "repeat_last_n": len(request.prompt) + request.max_tokens,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "seed": native["seed"] % 2**32,
            "logit_bias": [[token_id, value] for token_id, value in biases.items()],
            "ignore_eos": native["min_tokens"] > 0,
            "n_probs": max(1, request.sampling.logprobs),
        }
        async with self._events("/completion", body) as events:
            first = True
            async for event in events:
                if first:
                    cached = (event.get("timings") or {}).get("cache_n") or 0
                    yield Prefilled(len(request.prompt), int(cached))
                    first = False
                for step in _llama_steps(event, request):
                    yield step
                if event.get("stop_type") == "eos":
                    yield Step(min(request.stop_ids, default=0) if facts.end_id is None else facts.end_id, 0.0)


def _llama_steps(event: Mapping[str, Any], request: TokenRequest) -> list[Step]:
    if event.get("stop"):  # its tokens are those of the whole reply
        return []
    ids = event.get("tokens") or []
    content = event.get("completion_probabilities") or [None] * len(ids)
    steps = []
    for token_id, entry in zip(ids, content, strict=False):
        own = 0.0 if entry is None else float(entry["logprob"])
        best = () if entry is None else tuple(entry.get("top_logprobs") or ())[: request.sampling.logprobs]
        steps.append(Step(token_id, own, tuple(Alternative(int(one["id"]), float(one["logprob"])) for one in best)))
    return steps


def _parse(text: str, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineError(f"The server at {url} sent what isn't JSON.") from error


def _refusal(url: str, status: int, text: str) -> EngineError | RequestError | StreamLost:
    try:
        reason = _message(json.loads(text))
    except ValueError:
        reason = text.strip().splitlines()[0] if text.strip() else f"status {status}"
    message = f"The server at {url} refused the request: {reason[:MAX_REASON].rstrip('.')}."
    if status in BUSY:
        return StreamLost(message)
    return RequestError(message) if 400 <= status < 500 else EngineError(message)


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
