"""Turns that name a conversation are stored in it, and other APIs see them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from palaver.messages import Role
from palaver.store import ReplyStatus
from tests.chat.scripted_service import WAVE, reply
from tests.scripted_engine import HoldScript
from tests.server.socket.client import ScriptedServer, connect_client, scripted_server, texts

USER = [{"role": "user", "content": "Wave!"}]
AGAIN = [{"role": "user", "content": "Again!"}]


async def stored_path(server: ScriptedServer, id: str) -> list[tuple[Role, str]]:
    return [(message.role, message.text) for message in await server.stage.chat.path(id)]


async def test_what_is_said_is_kept_in_a_conversation_of_its_own(tmp_path: Path) -> None:
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER, enable_thinking=True, conversation="new")
        done = received[-1]
        assert done["type"] == "done"
        assert done["text"] == texts(received)
        assert received[0]["conversation"] == done["conversation"]
        assert await stored_path(it, done["reply"]) == [(Role.USER, "Wave!"), (Role.ASSISTANT, done["text"])]


async def test_it_goes_on_where_it_was_left(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, [WAVE, reply("hm", "again")]) as it, connect_client(it.url) as client:
        first = (await client.request(messages=USER, enable_thinking=True, conversation="new"))[-1]
        second = (await client.request(messages=AGAIN, enable_thinking=True, conversation=first["conversation"]))[-1]
        texts_on_path = [text for _, text in await stored_path(it, second["reply"])]
        assert texts_on_path == ["Wave!", first["text"], "Again!", "again"]


async def test_a_history_that_is_sent_again_stays_on_its_branch(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, [WAVE, reply("hm", "again")]) as it, connect_client(it.url) as client:
        first = (await client.request(messages=USER, enable_thinking=True, conversation="new"))[-1]
        history = [*USER, {"role": "assistant", "content": first["text"], "thinking": first["thinking"]}, *AGAIN]
        second = (await client.request(messages=history, enable_thinking=True, conversation=first["conversation"]))[-1]
        assert len(await stored_path(it, second["reply"])) == 4


async def test_it_goes_on_when_its_reader_says_goodbye(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with scripted_server(tmp_path, [[*WAVE[:4], HoldScript(gate), *WAVE[4:]]]) as it:
        async with connect_client(it.url) as client:
            await client.send(messages=USER, enable_thinking=True, conversation="new")
            first = await client.receive()
        gate.set()
        async with it.stage.chat.events(first["reply"]) as entries:
            _ = [entry async for entry in entries]
        stored = await it.stage.chat.message(first["reply"])
        assert stored.reply is not None
        assert stored.reply.status is ReplyStatus.DONE
        async with connect_client(it.url) as client:
            again = await client.request(type="resume", turn_id=first["turn_id"], after=0)
        assert (again[0], again[-1]["text"]) == (first, stored.text)


async def test_a_stop_stops_the_turn_and_keeps_what_was_said(tmp_path: Path) -> None:
    async with (
        scripted_server(tmp_path, [[*WAVE[:4], HoldScript(asyncio.Event()), *WAVE[4:]]]) as it,
        connect_client(it.url) as client,
    ):
        await client.send(messages=USER, enable_thinking=True, conversation="new")
        first = await client.receive()
        await client.send(type="stop")
        done = (await client.receive_turn())[-1]
        assert (done["type"], done["finish_reason"]) == ("done", "stopped")
        stored = await it.stage.chat.message(first["reply"])
        assert stored.text == done["text"]


async def test_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER, conversation="nowhere")
        assert (received[-1]["type"], "nowhere" in received[-1]["error"]) == ("error", True)
