"""Lost connections: streams continue after the last number, writes happen once, errors are reported."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.chat.interface import Chat, ConversationChange
from palaver.chat.turn_log import LogEntry
from palaver.client.errors import NoServer, ServerFailed, ServerRefused
from palaver.client.http_chat import MISSED, HttpChat, StreamPosition
from palaver.events import Finished, Started, fold
from palaver.messages import user
from palaver.store import NotFound
from tests.chat.scripted_service import OTHER, WAVE, Stage, open_stage, read_entries, read_until, reply
from tests.client.live import served
from tests.client.proxy import CuttingProxy, line_to
from tests.scripted_engine import Script


@asynccontextmanager
async def over_a_line(
    folder: Path, scripts: list[Script] | None = None, held: bool = False, patience: float = 20.0
) -> AsyncIterator[tuple[Stage, CuttingProxy]]:
    """A stage whose chat goes through the line; its service does not."""
    async with (
        open_stage(folder, scripts or (WAVE, OTHER), held=held) as stage,
        served(stage.service) as url,
        line_to(url) as line,
        HttpChat(line.url, patience=patience) as chat,
    ):
        await chat.wait_until_ready()
        yield replace(stage, chat=chat), line


def local(stage: Stage) -> Chat:
    return stage.service.chat(stage.service.store.users.ensure().id)


@pytest.mark.slow
async def test_a_stream_that_is_cut_at_every_byte_is_complete(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line):
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_entries(local(stage), sent.reply.id)
        complete = await read_entries(local(stage), sent.reply.id)  # `Started` has the thinking time of when it is sent
        size = 600  # the head of the answer and at least one event
        for first in range(size, size + 400, 7):
            allowed = iter([first])
            line.allowance = lambda request, allowed=allowed: next(allowed, None) if b"/events" in request else None  # type: ignore[misc]
            assert await read_entries(stage.chat, sent.reply.id) == complete
        assert line.cuts > 30


@pytest.mark.slow
async def test_fifty_cuts_during_one_reply_lose_and_repeat_nothing(tmp_path: Path) -> None:
    words = reply("so", "word " * 120)
    dice = random.Random(5)
    async with over_a_line(tmp_path, [words]) as (stage, line):
        conversation = await stage.chat.create_conversation()
        line.allowance = lambda request: dice.randint(500, 1200) if b"/events" in request else None
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        received = await read_entries(stage.chat, sent.reply.id)
        assert line.cuts >= 50
        assert fold(entry.event for entry in received).message.text == "word " * 120
        numbers = [entry.number for entry in received if not isinstance(entry.event, Finished) and entry.number]
        assert sorted(set(numbers)) == list(range(1, received[-1].number + 1))
        complete = [
            entry
            for entry in await read_entries(local(stage), sent.reply.id)
            if not isinstance(entry.event, Started)  # it has the thinking time of when it is sent
        ]
        assert [entry for entry in received if entry in complete] == complete


async def test_a_server_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    async with over_a_line(tmp_path, held=True) as (stage, line):
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        async with stage.chat.events(sent.reply.id) as stream:
            first = await anext(stream)
            line.down = True
            line.cut()
            waiting = asyncio.create_task(stage.chat.message(sent.reply.id))
            rest = asyncio.create_task(_all(stream))
            stage.hold.set()
            await read_entries(local(stage), sent.reply.id)
            assert not rest.done()
            assert not waiting.done()
            line.down = False
            received = [first, *await rest]
            assert (await waiting).id == sent.reply.id
        complete = await read_entries(local(stage), sent.reply.id)
        assert fold(entry.event for entry in received) == fold(entry.event for entry in complete)


async def _all(stream: AsyncIterator[LogEntry]) -> list[LogEntry]:
    return [one async for one in stream]


async def test_retries_have_an_end(tmp_path: Path) -> None:
    async with over_a_line(tmp_path, held=True, patience=0.2) as (stage, line):
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        line.down = True
        line.cut()
        with pytest.raises(NoServer, match="can't be reached"):
            await read_entries(stage.chat, sent.reply.id)
        with pytest.raises(NoServer):
            await stage.chat.conversation(conversation.id)
        stage.hold.set()


async def test_a_write_whose_response_was_lost_happens_once(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line):
        conversation = await stage.chat.create_conversation()

        def lose_the_first(request: bytes) -> int | None:
            return 5 if line.cuts == 0 and b"/say" in request else None

        line.allowance = lose_the_first
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        assert line.cuts == 1
        assert sum(b"/say" in request for request in line.requests) == 2
        await read_entries(stage.chat, sent.reply.id)
        assert [node.id for node in await stage.chat.nodes(conversation.id)] == [sent.message.id, sent.reply.id]


async def test_a_request_that_is_not_idempotent_is_not_retried(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line):
        conversation = await stage.chat.create_conversation()
        first = await stage.chat.append_message(conversation.id, None, user("one"))
        for to in (first.id, None, first.id):
            await stage.chat.move_cursor(conversation.id, "me", to)
        line.allowance = lambda request: 5 if b"/undo" in request else None
        with pytest.raises(NoServer):
            await stage.chat.undo(conversation.id, "me")
        line.allowance = lambda request: None
        assert sum(b"/undo" in request for request in line.requests) == 1
        assert (await stage.chat.cursor(conversation.id, "me")).message_id is None


async def test_changes_report_that_some_may_be_missed(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line), stage.chat.changes() as changes:
        first = await stage.chat.create_conversation()
        assert (await anext(changes)).conversation_id == first.id
        line.cut()
        assert await anext(changes) == MISSED
        second = await stage.chat.create_conversation()
        while (change := await anext(changes)) == MISSED:
            pass
        assert change.conversation_id == second.id


async def test_changes_continue_after_a_server_restart(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage, AsyncExitStack() as stack:
        async with served(stage.service) as url:
            chat = await stack.enter_async_context(HttpChat(url))
            changes = await stack.enter_async_context(chat.changes())
            first = await chat.create_conversation()
            assert (await anext(changes)).conversation_id == first.id
        coming = asyncio.create_task(_next(changes))
        async with served(stage.service, port=int(url.rpartition(":")[2])):
            assert await coming == MISSED
            second = await chat.create_conversation()
            assert (await anext(changes)).conversation_id == second.id


async def _next(changes: AsyncIterator[ConversationChange]) -> ConversationChange:
    return await anext(changes)


async def test_a_closed_stream_leaves_nothing_open(tmp_path: Path) -> None:
    async with over_a_line(tmp_path, held=True) as (stage, _):
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        for _ in range(20):
            await read_until(stage.chat, sent.reply.id, 1)
        stage.hold.set()
        await read_entries(stage.chat, sent.reply.id)
        assert not stage.service.changes._subscribers


async def test_a_missing_server_is_reported_at_once() -> None:
    async with HttpChat("http://127.0.0.1:9") as chat:
        with pytest.raises(NoServer, match="is it running"):
            await chat.model()
        with pytest.raises(NoServer):
            await read_entries(chat, "x")
        with pytest.raises(NoServer):
            async with chat.changes():
                pass


async def test_a_foreign_server_is_reported() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, body = answers.pop(0)
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    answers = [("404 Not Found", "<html>"), ("500 Oops", "{}"), ("200 OK", "<html>"), ("200 OK", '{"id": 3}')]
    server = await asyncio.start_server(other, "127.0.0.1", 0)
    async with server, HttpChat(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as chat:
        with pytest.raises(ServerRefused, match="Palaver server"):
            await chat.model()
        with pytest.raises(ServerFailed, match="500"):
            await chat.model()
        with pytest.raises(ServerFailed, match="not understood"):
            await chat.model()
        with pytest.raises(ServerFailed, match="not understood"):
            await chat.conversation("x")


@pytest.mark.parametrize("id", ["", "..", "a/b", "../conversations", "x?y", "x#y", "%2e%2e", "é", "\x00"])
async def test_invalid_ids_are_not_found(id: str) -> None:
    async with HttpChat("http://127.0.0.1:9") as chat:
        for attempt in (chat.message(id), chat.conversation(id), chat.stop_reply(id), chat.blob(id)):
            with pytest.raises(NotFound):
                await attempt


def test_a_status_with_a_later_thinking_time_is_not_sent_twice() -> None:
    position = StreamPosition(0)
    assert position.advance(LogEntry(0, Started(3, 0, thinking_seconds=0.1)))
    assert not position.advance(LogEntry(0, Started(3, 0, thinking_seconds=0.4)))
