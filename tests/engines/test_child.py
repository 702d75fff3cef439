"""The engine process, served in this one over a connection: commands for requests that are being prepared."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from palaver.engines.core.token_stream import TokenRequest, TokenStreamEngine
from palaver.engines.host.child import EngineHost
from palaver.engines.host.frames import Frame, OutputFrame, encode_frame, read_frame
from palaver.generation import AnswerRequested, Ended, Finish, Prompt, Step
from palaver.sampling import Sampling
from tests.engines.test_token_stream import CLOSING, GREEDY, INFO, THOUGHT, VOCABULARY, CountingSource

PROMPT = Prompt((1, 2), phases=THOUGHT)


@dataclass
class SlowSource(CountingSource):
    """Prepares requests as soon as `released` is set."""

    preparing: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def prepare(self, request: TokenRequest) -> None:
        self.preparing.set()
        await self.released.wait()
        await super().prepare(request)


class Client:
    """The supervisor's side of a connection to an engine host."""

    def __init__(
        self, host: EngineHost, source: SlowSource, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.host = host
        self.source = source
        self._reader = reader
        self._writer = writer
        self.outputs: dict[int, list[OutputFrame]] = {}
        self.progress: list[tuple[int, str]] = []

    def send(self, *frames: Frame) -> None:
        self._writer.write(b"".join(map(encode_frame, frames)))

    async def read_until_end(self, number: int) -> list[OutputFrame]:
        """The outputs of the request, up to its end."""
        outputs = self.outputs.setdefault(number, [])
        while not (outputs and isinstance(outputs[-1], Ended)):
            await self._read()
        return outputs

    async def drain(self) -> None:
        """Waits until all commands so far were carried out."""
        self.send({"do": "figures", "number": 99})
        while "answer" not in await self._read():
            pass

    async def _read(self) -> Frame:
        async with asyncio.timeout(30):
            frame = await read_frame(self._reader)
        assert frame is not None
        for number, output in frame.get("outputs", ()):
            self.outputs.setdefault(number, []).append(output)
        if "request" in frame:
            self.progress.append((frame["request"], frame["progress"]))
        return frame


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    ours, its = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    its_reader, its_writer = await asyncio.open_connection(sock=its)
    host, source = EngineHost(its_reader, its_writer), SlowSource()
    host._engine = TokenStreamEngine(INFO, VOCABULARY, source)
    serving = asyncio.create_task(host._serve())
    client = Client(host, source, reader, writer)
    yield client
    client.send({"do": "close"})
    await serving
    for one in (writer, its_writer):
        one.close()
        await one.wait_closed()


def generate(number: int, sampling: Sampling = GREEDY) -> Frame:
    return {"do": "generate", "number": number, "prompt": PROMPT, "sampling": sampling, "choice": 0}


async def test_a_request_that_is_stopped_while_it_is_prepared_ends_once(client: Client) -> None:
    client.send(generate(1))
    await client.source.preparing.wait()
    client.send({"do": "stop", "number": 1}, {"do": "stop", "number": 1}, {"do": "answer_now", "number": 1})
    assert await client.read_until_end(1) == [Ended(Finish.STOPPED)]
    client.source.released.set()
    client.send(generate(2))
    assert await client.read_until_end(2)
    assert client.outputs[1] == [Ended(Finish.STOPPED)], "nothing follows the end"
    assert (1, "RUNNING") not in client.progress


@pytest.mark.parametrize("command", ["stop", "cancel"])
async def test_a_request_may_end_before_it_begins(client: Client, command: str) -> None:
    end: Frame = {"do": "stop", "number": 1} if command == "stop" else {"do": "cancel", "number": 1}
    client.send(generate(1), {"do": "answer_now", "number": 1}, end)
    await client.drain()
    client.source.released.set()
    client.send(generate(2))
    assert await client.read_until_end(2)
    assert client.outputs.get(1, []) == ([Ended(Finish.STOPPED)] if command == "stop" else [])
    assert 1 not in client.host._tasks, "nothing of it is kept"


async def test_an_answer_that_is_requested_while_the_request_is_prepared_begins_at_once(client: Client) -> None:
    client.send(generate(1))
    await client.source.preparing.wait()
    client.send({"do": "answer_now", "number": 1})
    await client.drain()
    client.source.released.set()
    outputs = await client.read_until_end(1)
    assert AnswerRequested(0) in outputs
    assert [output.token_id for output in outputs if isinstance(output, Step)][:2] == list(CLOSING)
