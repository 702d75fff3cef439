"""A turn of the socket that names a conversation is that conversation's, at every door."""

from __future__ import annotations

import asyncio
from pathlib import Path

from palaver.messages import Role
from palaver.store import ReplyStatus
from tests.chat.making import WAVE, reply
from tests.scripted_engine import HoldScript
from tests.server.socket.talk import Scene, scene, talking, texts

USER = [{"role": "user", "content": "Wave!"}]
AGAIN = [{"role": "user", "content": "Again!"}]


async def kept(scene: Scene, id: str) -> list[tuple[Role, str]]:
    return [(message.role, message.text) for message in await scene.stage.chat.path(id)]


async def test_what_is_said_is_kept_in_a_conversation_of_its_own(tmp_path: Path) -> None:
    async with scene(tmp_path) as it, talking(it.url) as talk:
        told = await talk.ask(messages=USER, enable_thinking=True, conversation="new")
        done = told[-1]
        assert done["type"] == "done"
        assert done["text"] == texts(told)
        assert told[0]["conversation"] == done["conversation"]
        assert await kept(it, done["reply"]) == [(Role.USER, "Wave!"), (Role.ASSISTANT, done["text"])]


async def test_it_goes_on_where_it_was_left(tmp_path: Path) -> None:
    async with scene(tmp_path, [WAVE, reply("hm", "again")]) as it, talking(it.url) as talk:
        first = (await talk.ask(messages=USER, enable_thinking=True, conversation="new"))[-1]
        second = (await talk.ask(messages=AGAIN, enable_thinking=True, conversation=first["conversation"]))[-1]
        said = [text for _, text in await kept(it, second["reply"])]
        assert said == ["Wave!", first["text"], "Again!", "again"]


async def test_a_history_that_is_sent_again_stays_on_its_branch(tmp_path: Path) -> None:
    async with scene(tmp_path, [WAVE, reply("hm", "again")]) as it, talking(it.url) as talk:
        first = (await talk.ask(messages=USER, enable_thinking=True, conversation="new"))[-1]
        history = [*USER, {"role": "assistant", "content": first["text"], "thinking": first["thinking"]}, *AGAIN]
        second = (await talk.ask(messages=history, enable_thinking=True, conversation=first["conversation"]))[-1]
        assert len(await kept(it, second["reply"])) == 4


async def test_it_goes_on_when_its_reader_says_goodbye(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with scene(tmp_path, [[*WAVE[:4], HoldScript(gate), *WAVE[4:]]]) as it:
        async with talking(it.url) as talk:
            await talk.send(messages=USER, enable_thinking=True, conversation="new")
            begun = await talk.next()
        gate.set()
        async with it.stage.chat.events(begun["reply"]) as entries:
            _ = [entry async for entry in entries]
        stored = await it.stage.chat.message(begun["reply"])
        assert stored.reply is not None
        assert stored.reply.status is ReplyStatus.DONE
        async with talking(it.url) as talk:
            again = await talk.ask(type="resume", turn_id=begun["turn_id"], after=0)
        assert (again[0], again[-1]["text"]) == (begun, stored.text)


async def test_a_stop_stops_the_turn_and_keeps_what_was_said(tmp_path: Path) -> None:
    async with scene(tmp_path, [[*WAVE[:4], HoldScript(asyncio.Event()), *WAVE[4:]]]) as it, talking(it.url) as talk:
        await talk.send(messages=USER, enable_thinking=True, conversation="new")
        begun = await talk.next()
        await talk.send(type="stop")
        done = (await talk.rest())[-1]
        assert (done["type"], done["finish_reason"]) == ("done", "stopped")
        stored = await it.stage.chat.message(begun["reply"])
        assert stored.text == done["text"]


async def test_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    async with scene(tmp_path) as it, talking(it.url) as talk:
        told = await talk.ask(messages=USER, conversation="nowhere")
        assert (told[-1]["type"], "nowhere" in told[-1]["error"]) == ("error", True)
