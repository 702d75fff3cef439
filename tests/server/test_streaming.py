"""Pieces of a stream that are ready at once are written at once; none waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from palaver.server.sse import MAX_WAITING, joined


async def test_what_is_ready_at_once_is_one_write() -> None:
    gate = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes]:
        yield b"a"
        yield b"b"
        await gate.wait()
        yield b"c"

    batches = joined(pieces())
    assert await anext(batches) == b"ab"
    gate.set()
    assert [batch async for batch in batches] == [b"c"]


async def test_an_error_comes_after_what_was_before_it() -> None:
    async def pieces() -> AsyncGenerator[bytes]:
        yield b"a"
        raise ValueError("the source failed")

    batches = joined(pieces())
    assert await anext(batches) == b"a"
    with pytest.raises(ValueError, match="the source failed"):
        await anext(batches)


async def test_a_slow_reader_bounds_what_is_taken() -> None:
    made = 0

    async def pieces() -> AsyncGenerator[bytes]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield bytes(MAX_WAITING // 4)

    batches = joined(pieces())
    first = await anext(batches)
    for _ in range(10):
        await asyncio.sleep(0)
    assert made <= 10
    assert len(first) + sum([len(batch) async for batch in batches]) == 100 * (MAX_WAITING // 4)


async def test_the_source_is_ended_with_its_reader() -> None:
    ended = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.set()

    source = pieces()
    batches = joined(source)
    assert await anext(batches) == b"a"
    await batches.aclose()
    await source.aclose()
    assert ended.is_set()
