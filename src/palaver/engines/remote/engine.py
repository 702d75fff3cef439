"""The engine of a model on a server elsewhere. The model's folder here gives the tokenizer and the defaults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palaver.engines.base import (
    BY_BATCH,
    EXACTNESS_LABELS,
    NATIVE_SAMPLER,
    REMOTE_RUNNER,
    Capability,
    EngineInfo,
    Fingerprint,
)
from palaver.engines.core.checkpoint import has_processor, read_json
from palaver.engines.core.decoder_config import generation_settings
from palaver.engines.core.gguf_metadata import end_ids as gguf_end_ids
from palaver.engines.core.gguf_metadata import sampling_defaults
from palaver.engines.core.token_stream import TokenRequest, TokenStreamEngine
from palaver.engines.remote.servers import LlamaServer, ServerFacts, TokenServer, VllmServer
from palaver.engines.vllm.sampling_params import check_native, native_lacks
from palaver.errors import BrokenModel
from palaver.generation import Prefilled, Prompt, Step
from palaver.gguf import read_gguf
from palaver.phases import Vocabulary
from palaver.sampling import Sampling

SERVERS: dict[str, Callable[[str, str | None], TokenServer]] = {"vllm": VllmServer, "llamacpp": LlamaServer}
SAMPLE = "Palaver: does the server have the same tokenizer? Ünïcödé, 12345,\n\tдва, 三."
"""A text that the server tokenizes, to compare the tokenizers."""
SERVER_SAMPLER = "the server's sampler"
"""The sampler's name in messages."""
SAMPLER_THERE = "the sampler of the server chooses the tokens"


class RemoteSource:
    """A server's tokens. Its own sampler chooses them."""

    forces_tokens = False

    def __init__(self, server: TokenServer, facts: ServerFacts, max_running: int | None) -> None:
        self._server = server
        self._facts = facts
        self._limit = asyncio.Semaphore(max_running) if max_running is not None else None

    async def open(self) -> None:
        """`load` has connected."""

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        check_native(prompt, sampling, self._server.max_temperature, SERVER_SAMPLER)

    async def prepare(self, request: TokenRequest) -> None:
        """The server does everything itself."""

    async def stream(self, request: TokenRequest) -> AsyncGenerator[Prefilled | Step]:
        if self._limit is not None:
            await self._limit.acquire()
        try:
            async with aclosing(self._server.stream(request, self._facts)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if self._limit is not None:
                self._limit.release()

    async def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self._server.close()


def load(
    model: Path,
    *,
    address: str,
    vocabulary: Vocabulary,
    key: str | None = None,
    context: int | None = None,
    max_running: int | None = None,
) -> TokenStreamEngine:
    """Asks the server for its model. `model`: the folder or GGUF file here. Raises BrokenModel if the server can't be
    reached, takes no token ids, or has another tokenizer."""
    kind, _, url = address.partition("+")
    facts = asyncio.run(_ask(SERVERS[kind](url, key), vocabulary))
    server = SERVERS[kind](url, key)
    info = describe(model, facts, kind, url, len(vocabulary), context)
    return TokenStreamEngine(info, vocabulary, RemoteSource(server, facts, max_running))


async def _ask(server: TokenServer, vocabulary: Vocabulary) -> ServerFacts:
    try:
        facts = await server.describe()
        ids = await server.tokenize(SAMPLE)
        known = all(0 <= token_id < len(vocabulary) for token_id in ids)
        if not known or SAMPLE.encode() not in b"".join(vocabulary[token_id] for token_id in ids):
            raise BrokenModel(
                f"The server at {server.url} has another tokenizer than the model here: name the model that it serves."
            )
        return facts
    finally:
        await server.close()


def describe(
    model: Path, facts: ServerFacts, kind: str, url: str, vocabulary_size: int, context: int | None
) -> EngineInfo:
    defaults, end_ids = _settings(model)
    host = urlsplit(url).netloc.rpartition("@")[2]
    fingerprint = Fingerprint(
        REMOTE_RUNNER, f"{kind}-{facts.build}", host, "", EXACTNESS_LABELS[BY_BATCH], NATIVE_SAMPLER
    )
    lacks = native_lacks(False, SERVER_SAMPLER)
    draws_anew = f"{SERVER_SAMPLER} may draw anew after a stop; greedy replies continue exactly"
    lacks[Capability.EXACT_CONTINUATION] = draws_anew
    if model.is_dir() and has_processor(model):
        lacks[Capability.MEDIA] = "only token ids are sent to a server elsewhere"
    if not facts.isolates_owners:
        lacks[Capability.OWNER_ISOLATION] = "the server's cache of prompts has no owners"
    return EngineInfo(
        model=facts.model,
        context_length=min(facts.context_length, context or facts.context_length),
        vocabulary_size=vocabulary_size,
        end_ids=end_ids,
        defaults=defaults,
        device=host,
        dtype="the server's",
        reuse="as the server does",
        steps=f"{'vLLM' if kind == 'vllm' else 'llama.cpp'} {facts.build} at {host}; {SAMPLER_THERE}",
        exactness=BY_BATCH,
        fingerprint=str(fingerprint),
        lacks=lacks,
    )


def _settings(model: Path) -> tuple[Sampling, frozenset[int]]:
    """The sampling defaults and end ids, from the files here."""
    if model.is_file():
        header = read_gguf(model)
        return sampling_defaults(header), gguf_end_ids(header)
    config: Any = read_json(model / "config.json") if (model / "config.json").is_file() else {}
    return generation_settings(model, config if isinstance(config, dict) else {})
