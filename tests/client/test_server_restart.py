"""The server is killed during a reply and started again: subscribers continue."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaver.chat.interface import Column, ModelState
from palaver.client.http_chat import MISSED, HttpChat
from palaver.events import Finished, fold
from palaver.generation import Finish
from palaver.messages import assistant, user
from palaver.store import ReplyStatus
from tests.chat.conformance import ANSWER, THOUGHT
from tests.chat.scripted_service import WAVE, read_entries, read_until

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(folder: Path, port: int, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.client.server_process", str(folder), str(port), *more),
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
async def test_a_reply_continues_after_the_server_was_killed(tmp_path: Path, slow: bool) -> None:
    async with process(tmp_path, 0, "held") as (first, url), HttpChat(url) as chat:
        conversation = await chat.create_conversation()
        sent = await chat.send_message(conversation.id, None, user("Wave!"))
        async with chat.events(sent.reply.id) as stream, chat.changes() as changes:
            received = [await anext(stream)]
            while not received[-1].number:
                received.append(await anext(stream))
            first.send_signal(signal.SIGKILL)
            await first.wait()
            port = int(url.rpartition(":")[2])
            async with process(tmp_path, port, *(["slow"] if slow else [])) as (second, again):
                assert again == url
                if slow:
                    await read_while_loading(chat, sent.reply.id, second)
                received += [entry async for entry in stream]
                assert await anext(changes) == MISSED
                complete = await read_entries(chat, sent.reply.id)
                done = await chat.message(sent.reply.id)
                tokens = await chat.tokens(sent.reply.id)
    ending = received[-1].event
    assert isinstance(ending, Finished)
    assert ending.finish is Finish.END
    assert fold(entry.event for entry in received).message == assistant(ANSWER, THOUGHT)
    assert fold(entry.event for entry in complete).message == assistant(ANSWER, THOUGHT)
    numbers = [entry.number for entry in received if entry in complete and entry.number]
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


@pytest.mark.slow
async def test_all_replies_of_a_comparison_continue_after_the_server_was_killed(tmp_path: Path) -> None:
    columns = [Column({"temperature": 0.0}), Column({"temperature": 1.0}, name="warm")]
    async with process(tmp_path, 0, "held") as (first, url), HttpChat(url) as chat:
        conversation = await chat.create_conversation()
        comparison = await chat.compare(conversation.id, None, user("Wave!"), columns, blind=True)
        replies = [one.reply_id for one in comparison.replies]
        for id in replies:
            await read_until(chat, id, 2)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        async with process(tmp_path, int(url.rpartition(":")[2])):
            for id in replies:
                received = await read_entries(chat, id)
                assert fold(entry.event for entry in received).message == assistant(ANSWER, THOUGHT)
                assert [token.token_id for token in await chat.tokens(id)] == WAVE
            assert await chat.comparisons(conversation.id) == (comparison,)
            assert (await chat.choose_reply(comparison.id, replies[1])).chosen_id == replies[1]
            assert (await chat.conversation(conversation.id)).head_id == replies[1]
