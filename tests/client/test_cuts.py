"""A bad line: streams go on from the last number, writes happen once, and what can't be reached is said."""

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
from palaver.client import HttpChat, NoServer, ServerFailed, ServerRefused
from palaver.client.streams import MISSED
from palaver.events import Finished, fold
from palaver.messages import user
from palaver.store import NotFound
from tests.chat.making import OTHER, WAVE, Stage, entries, reply, staged, until
from tests.client.live import served
from tests.client.proxy import Line, line_to
from tests.scripted_engine import Script


@asynccontextmanager
async def over_a_line(
    folder: Path, scripts: list[Script] | None = None, held: bool = False, patience: float = 20.0
) -> AsyncIterator[tuple[Stage, Line]]:
    """A stage whose chat goes through the line; its service does not."""
    async with (
        staged(folder, scripts or (WAVE, OTHER), held=held) as stage,
        served(stage.service) as url,
        line_to(url) as line,
        HttpChat(line.url, patience=patience) as chat,
    ):
        await chat.ready()
        yield replace(stage, chat=chat), line


def local(stage: Stage) -> Chat:
    return stage.service.chat(stage.service.store.users.ensure().id)


@pytest.mark.slow
async def test_a_stream_that_is_cut_at_every_byte_is_read_whole(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line):
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        whole = await entries(local(stage), said.reply.id)
        size = 600  # the head of the answer and at least one event
        for first in range(size, size + 400, 7):
            allowed = iter([first])
            line.allowance = lambda request, allowed=allowed: next(allowed, None) if b"/events" in request else None  # type: ignore[misc]
            assert await entries(stage.chat, said.reply.id) == whole
        assert line.cuts > 30


@pytest.mark.slow
async def test_fifty_cuts_during_one_reply_lose_and_double_nothing(tmp_path: Path) -> None:
    words = reply("so", "word " * 120)
    dice = random.Random(5)
    async with over_a_line(tmp_path, [words]) as (stage, line):
        talk = await stage.chat.create()
        line.allowance = lambda request: dice.randint(500, 1200) if b"/events" in request else None
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        told = await entries(stage.chat, said.reply.id)
        assert line.cuts >= 50
        assert fold(entry.event for entry in told).message.text == "word " * 120
        numbers = [entry.number for entry in told if not isinstance(entry.event, Finished) and entry.number]
        assert sorted(set(numbers)) == list(range(1, told[-1].number + 1))
        whole = await entries(local(stage), said.reply.id)
        assert [entry for entry in told if entry in whole] == whole


async def test_a_server_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    async with over_a_line(tmp_path, held=True) as (stage, line):
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        async with stage.chat.events(said.reply.id) as stream:
            first = await anext(stream)
            line.down = True
            line.cut()
            waiting = asyncio.create_task(stage.chat.message(said.reply.id))
            rest = asyncio.create_task(_all(stream))
            stage.hold.set()
            await entries(local(stage), said.reply.id)
            assert not rest.done()
            assert not waiting.done()
            line.down = False
            told = [first, *await rest]
            assert (await waiting).id == said.reply.id
        whole = await entries(local(stage), said.reply.id)
        assert fold(entry.event for entry in told) == fold(entry.event for entry in whole)


async def _all(stream: AsyncIterator[LogEntry]) -> list[LogEntry]:
    return [one async for one in stream]


async def test_patience_has_an_end(tmp_path: Path) -> None:
    async with over_a_line(tmp_path, held=True, patience=0.2) as (stage, line):
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        line.down = True
        line.cut()
        with pytest.raises(NoServer, match="can't be reached"):
            await entries(stage.chat, said.reply.id)
        with pytest.raises(NoServer):
            await stage.chat.conversation(talk.id)
        stage.hold.set()


async def test_a_write_whose_answer_was_lost_happens_once(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line):
        talk = await stage.chat.create()

        def lose_the_first(request: bytes) -> int | None:
            return 5 if line.cuts == 0 and b"/say" in request else None

        line.allowance = lose_the_first
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        assert line.cuts == 1
        assert sum(b"/say" in request for request in line.requests) == 2
        await entries(stage.chat, said.reply.id)
        assert [node.id for node in await stage.chat.nodes(talk.id)] == [said.message.id, said.reply.id]


async def test_what_must_not_happen_twice_is_not_sent_again(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line):
        talk = await stage.chat.create()
        first = await stage.chat.append(talk.id, None, user("one"))
        for to in (first.id, None, first.id):
            await stage.chat.move(talk.id, "me", to)
        line.allowance = lambda request: 5 if b"/undo" in request else None
        with pytest.raises(NoServer):
            await stage.chat.undo(talk.id, "me")
        line.allowance = lambda request: None
        assert sum(b"/undo" in request for request in line.requests) == 1
        assert (await stage.chat.cursor(talk.id, "me")).message_id is None


async def test_changes_say_when_something_may_have_been_missed(tmp_path: Path) -> None:
    async with over_a_line(tmp_path) as (stage, line), stage.chat.changes() as changes:
        first = await stage.chat.create()
        assert (await anext(changes)).conversation_id == first.id
        line.cut()
        assert await anext(changes) == MISSED
        second = await stage.chat.create()
        while (change := await anext(changes)) == MISSED:
            pass
        assert change.conversation_id == second.id


async def test_a_server_that_is_closed_and_started_again_is_listened_to_again(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, AsyncExitStack() as stack:
        async with served(stage.service) as url:
            chat = await stack.enter_async_context(HttpChat(url))
            changes = await stack.enter_async_context(chat.changes())
            first = await chat.create()
            assert (await anext(changes)).conversation_id == first.id
        coming = asyncio.create_task(_next(changes))
        async with served(stage.service, port=int(url.rpartition(":")[2])):
            assert await coming == MISSED
            second = await chat.create()
            assert (await anext(changes)).conversation_id == second.id


async def _next(changes: AsyncIterator[ConversationChange]) -> ConversationChange:
    return await anext(changes)


async def test_a_reader_that_leaves_early_leaves_nothing_open(tmp_path: Path) -> None:
    async with over_a_line(tmp_path, held=True) as (stage, _):
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        for _ in range(20):
            await until(stage.chat, said.reply.id, 1)
        stage.hold.set()
        await entries(stage.chat, said.reply.id)
        assert not stage.service.changes._listeners


async def test_where_there_is_no_server_it_is_said_at_once() -> None:
    async with HttpChat("http://127.0.0.1:9") as chat:
        with pytest.raises(NoServer, match="is it running"):
            await chat.model()
        with pytest.raises(NoServer):
            await entries(chat, "x")
        with pytest.raises(NoServer):
            async with chat.changes():
                pass


async def test_what_is_no_palaver_server_is_said() -> None:
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
async def test_what_is_no_id_is_not_found(id: str) -> None:
    async with HttpChat("http://127.0.0.1:9") as chat:
        for attempt in (chat.message(id), chat.conversation(id), chat.stop(id), chat.blob(id)):
            with pytest.raises(NotFound):
                await attempt
