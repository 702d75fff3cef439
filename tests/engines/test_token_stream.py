"""The engine over a token source, with a source of the tests: what it asks for, and with which media."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import pytest

from palaver.engines.base import EngineInfo
from palaver.engines.core import token_stream
from palaver.engines.core.media import MediaCache, with_media
from palaver.engines.core.token_stream import StreamLost, TokenRequest, TokenStreamEngine
from palaver.errors import BadParameter, UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem, MediaSpan, Prefilled, Prompt, Step
from palaver.phases import Phase, Phases, State, Trigger
from palaver.sampling import Sampling
from tests.engines.generate import Run, continued, run

VOCABULARY = tuple(bytes([byte]) for byte in range(256))
INFO = EngineInfo("tiny", 64, 256, frozenset({0}), Sampling(), "cpu", "float32")
GREEDY = Sampling(temperature=0, max_tokens=4)
CLOSING = (200, 201)
"""A marker that ends a thought, and a line break."""
THOUGHT = Phases((State(Phase.THINKING, triggers=(Trigger(200, 1),), closing=CLOSING), State(Phase.ANSWER)))
PIXELS = MediaContent(bytes(12), (2, 2, 3), "uint8")


@dataclass
class CountingSource:
    """Says 65, 66, ..., by how long the reply is. Loses the connection once, after `lost_after` tokens."""

    lost_after: int | None = None
    forces_tokens: bool = False
    requests: list[TokenRequest] = field(default_factory=list)

    async def open(self) -> None:
        pass

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        pass

    async def prepare(self, request: TokenRequest) -> None:
        self.requests.append(request)

    async def stream(self, request: TokenRequest) -> AsyncGenerator[Prefilled | Step]:
        yield Prefilled(len(request.token_ids), 0)
        for place in range(len(request.prompt.reply_ids), 100):
            if place == self.lost_after:
                self.lost_after = None
                raise StreamLost("gone")
            yield Step(65 + place, -0.5)

    async def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


@dataclass
class UnreliableSource(CountingSource):
    """Loses the connection of submissions that continue a reply before they start, so many times."""

    losses: int = 2

    async def stream(self, request: TokenRequest) -> AsyncGenerator[Prefilled | Step]:
        if request.prompt.reply_ids and self.losses:
            self.losses -= 1
            raise StreamLost("gone")
        async for output in super().stream(request):
            yield output


@dataclass
class HeldSource(CountingSource):
    """Its first submission ends with the third token. Those that continue a reply start once `released` is set."""

    submitted: asyncio.Queue[TokenRequest] = field(default_factory=asyncio.Queue)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, request: TokenRequest) -> AsyncGenerator[Prefilled | Step]:
        self.submitted.put_nowait(request)
        if request.prompt.reply_ids:
            await self.released.wait()
        async for output in super().stream(request):
            if isinstance(output, Step) and output.token_id == 68:
                await asyncio.Event().wait()
            yield output


@dataclass
class Squares:
    """Expands a picture to three tokens. Counts how often."""

    placeholders: Mapping[str, str] = field(default_factory=lambda: {"image": "<image>"})
    numbers: Mapping[str, str] = field(default_factory=dict)
    max_sound_samples: int = 0
    sample_rate: int = 0
    options: tuple[str, ...] = ()
    processed: int = 0

    def process(self, item: MediaItem, content: MediaContent) -> Square:
        self.processed += 1
        return Square(MediaExpansion((7, 8, 9)), content)


@dataclass
class Square:
    expansion: MediaExpansion
    content: MediaContent
    nbytes: int = 12


def prompt_with(digest: str) -> Prompt:
    item = MediaItem("image", digest, "<image>", load=lambda: PIXELS)
    return Prompt((1, 7, 8, 9, 2), media=(MediaSpan(item, 1, 3),))


async def test_a_request_has_its_media_and_each_is_processed_once() -> None:
    source, squares = CountingSource(), Squares()
    media = MediaCache(squares)
    engine = TokenStreamEngine(with_media(INFO, media), VOCABULARY, source, media=media)
    assert engine.info.media == ("image", "video")
    assert engine.info.placeholders == {"image": "<image>"}
    prompt = prompt_with("a")
    assert engine.expand_media(prompt.media[0].item).token_ids == (7, 8, 9)
    whole = await run(engine, prompt, GREEDY)
    assert whole.ids == [65, 66, 67, 68]
    assert (await run(engine, continued(prompt, whole.ids[:2]), GREEDY)).ids == whole.ids[2:]
    assert squares.processed == 1
    for request in source.requests:
        assert list(request.media) == [prompt.media[0].item.key]
    await run(engine, prompt_with("b"), GREEDY)
    assert squares.processed == 2


async def test_a_reply_with_media_goes_on_after_its_connection_broke() -> None:
    source, squares = CountingSource(lost_after=2), Squares()
    media = MediaCache(squares, limit_bytes=0)
    engine = TokenStreamEngine(with_media(INFO, media), VOCABULARY, source, media=media)
    await run(engine, prompt_with("b"), GREEDY)
    source.lost_after = 2
    out = await run(engine, prompt_with("a"), GREEDY)
    assert out.ids == [65, 66, 67, 68]
    assert [len(request.prompt.reply_ids) for request in source.requests] == [0, 2, 0, 2]
    assert all(request.media for request in source.requests)
    assert squares.processed == 2, "a reply holds its media, whatever was evicted meanwhile"


async def test_without_media_they_are_refused() -> None:
    engine = TokenStreamEngine(INFO, VOCABULARY, CountingSource())
    with pytest.raises(UnsupportedContent, match="takes text only"):
        engine.expand_media(prompt_with("a").media[0].item)
    with pytest.raises(BadParameter, match="image"):
        await run(engine, prompt_with("a"), GREEDY)


async def test_a_forced_closing_arrives_although_its_submission_is_lost_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_stream, "RETRY_DELAYS_S", (0.0, 0.0))
    source = UnreliableSource()
    sampling = Sampling(temperature=0, max_tokens=7, thinking_budget=3)
    out = await run(TokenStreamEngine(INFO, VOCABULARY, source), Prompt((1, 2), phases=THOUGHT), sampling)
    assert source.losses == 0
    assert out.ids == [65, 66, 67, *CLOSING, 70, 71]


async def test_a_forced_closing_arrives_once_if_the_answer_is_requested_twice() -> None:
    source, out = HeldSource(), Run()
    engine = TokenStreamEngine(INFO, VOCABULARY, source)
    async with engine.generate(Prompt((1, 2), phases=THOUGHT), Sampling(temperature=0, max_tokens=7)) as outputs:
        while len(out.ids) < 3:
            out.add(await anext(outputs))
        for _ in range(2):
            await source.submitted.get()
            outputs.answer_now()
        assert (await source.submitted.get()).prompt.reply_ids == (65, 66, 67, *CLOSING)
        source.released.set()
        async for output in outputs:
            out.add(output)
    assert out.ids == [65, 66, 67, *CLOSING, 70, 71]
