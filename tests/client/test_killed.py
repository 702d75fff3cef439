"""The server is killed in the midst of a reply and started again: whoever was reading reads on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaver.chat.interface import ModelState
from palaver.client import HttpChat
from palaver.client.streams import MISSED
from palaver.events import Finished, fold
from palaver.generation import Finish
from palaver.messages import assistant, user
from palaver.store import ReplyStatus
from tests.chat.conformance import ANSWER, THOUGHT
from tests.chat.making import WAVE, entries

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(folder: Path, port: int, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.client.serving", str(folder), str(port), *more),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        yield child, (await child.stdout.readline()).decode().strip()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "while the model still loads"])
async def test_a_killed_server_comes_back_and_the_reply_goes_on(tmp_path: Path, slow: bool) -> None:
    async with process(tmp_path, 0, "held") as (first, url), HttpChat(url) as chat:
        talk = await chat.create()
        said = await chat.say(talk.id, None, user("Wave!"))
        async with chat.events(said.reply.id) as stream, chat.changes() as changes:
            told = [await anext(stream)]
            while not told[-1].number:
                told.append(await anext(stream))
            first.send_signal(signal.SIGKILL)
            await first.wait()
            port = int(url.rpartition(":")[2])
            async with process(tmp_path, port, *(["slow"] if slow else [])) as (second, again):
                assert again == url
                if slow:
                    await read_while_loading(chat, said.reply.id, second)
                told += [entry async for entry in stream]
                assert await anext(changes) == MISSED
                whole = await entries(chat, said.reply.id)
                done = await chat.message(said.reply.id)
                tokens = await chat.tokens(said.reply.id)
    ending = told[-1].event
    assert isinstance(ending, Finished)
    assert ending.finish is Finish.END
    assert fold(entry.event for entry in told).message == assistant(ANSWER, THOUGHT)
    assert fold(entry.event for entry in whole).message == assistant(ANSWER, THOUGHT)
    numbers = [entry.number for entry in told if entry in whole and entry.number]
    assert numbers == sorted(numbers)
    assert done.reply is not None
    assert done.reply.status is ReplyStatus.DONE
    assert [token.token_id for token in tokens] == WAVE


async def read_while_loading(chat: HttpChat, reply_id: str, server: asyncio.subprocess.Process) -> None:
    """A reader who is there before the model is not told that the reply has failed."""
    assert (await chat.model()).state is ModelState.LOADING
    async with chat.events(reply_id) as stream:
        assert server.stdin is not None
        server.stdin.write(b"\n")
        ending = [entry async for entry in stream][-1].event
    assert isinstance(ending, Finished)
