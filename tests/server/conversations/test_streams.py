"""The events of turns as streams: cut anywhere, resumed by number, many in one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.chat.interface import SentMessage
from palaver.events import Finished, fold
from palaver.messages import assistant, user
from palaver.server.app import Server
from palaver.server.settings import ServerSettings
from palaver.wire.events import Entry
from palaver.wire.sse import Decoder, Sent
from tests.chat.making import OTHER, WAVE, Stage, reply, staged
from tests.client.live import listening, served
from tests.scripted_engine import HoldScript, Script

THOUGHT, ANSWER = "think 👋", "Wave: 👋🏽 <think"


@dataclass
class Scene:
    stage: Stage
    http: httpx.AsyncClient

    async def said(self) -> SentMessage:
        talk = await self.stage.chat.create()
        return await self.stage.chat.say(talk.id, None, user("Wave!"))

    async def read(self, path: str, count: int | None = None, last: str | None = None, **more: Any) -> list[Sent]:
        """What a stream sends: all of it, or so many events, after which the line is cut."""
        headers = {} if last is None else {"last-event-id": last}
        async with self.http.stream(more.pop("method", "GET"), path, headers=headers, **more) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async with aclosing(sent_by(answer)) as sent:
                read: list[Sent] = []
                while count is None or len(read) < count:
                    try:
                        read.append(await anext(sent))
                    except StopAsyncIteration:
                        break
                return read


async def sent_by(answer: httpx.Response) -> AsyncGenerator[Sent]:
    decoder = Decoder()
    async for chunk in answer.aiter_bytes():
        for sent in decoder.feed(chunk):
            yield sent


@asynccontextmanager
async def scene(folder: Path, scripts: list[Script] | None = None, held: bool = False) -> AsyncIterator[Scene]:
    async with (
        staged(folder, scripts or (WAVE, OTHER), held=held) as stage,
        served(stage.service) as url,
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
    ):
        await stage.chat.ready()
        yield Scene(stage, http)


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene(tmp_path) as it:
        yield it


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene(tmp_path, held=True) as it:
        yield it
        it.stage.hold.set()


def numbered(sent: list[Sent]) -> list[str]:
    """The data of events that have a number of their own."""
    without = ("waiting", "started", "snapshot", "finished", "failed")
    return [one.data for one in sent if json.loads(one.data)["event"]["type"] not in without]


async def test_an_ended_turn_is_told_again_from_every_number(shown: Scene) -> None:
    said = await shown.said()
    path = f"/api/turns/{said.reply.id}/events"
    whole = await shown.read(path)
    entries = [Entry.model_validate_json(one.data).value() for one in whole]
    assert fold(entry.event for entry in entries).message == assistant(ANSWER, THOUGHT)
    assert isinstance(entries[-1].event, Finished)
    assert [one.id for one in whole] == [str(entry.number) for entry in entries]
    for cut in range(1, len(whole) + 1):
        first = await shown.read(path, cut)
        rest = await shown.read(path, last=first[-1].id)
        assert numbered(first) + numbered(rest) == numbered(whole)
        assert rest[-1] == whole[-1]
    assert await shown.read(path, params={"after": 2}) == await shown.read(path, last="2", params={"after": 0})


async def test_a_running_turn_is_cut_and_resumed_at_every_event(tmp_path: Path) -> None:
    gates = [asyncio.Event() for _ in WAVE]
    script = [item for token, gate in zip(WAVE, gates, strict=True) for item in (token, HoldScript(gate))]
    async with scene(tmp_path, [script]) as running:
        said = await running.said()
        path = f"/api/turns/{said.reply.id}/events"
        seen: list[Sent] = []
        last = "0"
        opened = iter(gates)
        while not seen or '"finished"' not in seen[-1].data:
            reading = asyncio.create_task(next_new(running, path, last))
            while not reading.done():  # the model speaks on only when nobody has heard anything new
                done, _ = await asyncio.wait([reading], timeout=0.02)
                if not done and (gate := next(opened, None)):
                    gate.set()
            seen.append(reading.result())
            last = seen[-1].id or last
        whole = await running.read(path)
        assert numbered(seen) == numbered(whole)
        assert seen[-1] == whole[-1]


async def next_new(running: Scene, path: str, last: str) -> Sent:
    """Connects, takes one event that is news, cuts the line."""
    async with running.http.stream("GET", path, headers={"last-event-id": last}) as answer:
        async for sent in sent_by(answer):
            if sent.id != last or '"finished"' in sent.data:
                return sent
    raise AssertionError("the stream ended without a word")


async def test_many_turns_come_in_one_stream(held: Scene) -> None:
    chat = held.stage.chat
    talk = await chat.create()
    first = await chat.say(talk.id, None, user("Wave!"))
    second = await chat.reply(talk.id, first.message.id)
    third = await chat.reply(talk.id, first.message.id)
    ids = [first.reply.id, second.id, third.id]
    turns = ",".join([f"{ids[0]}:0", ids[1], f"{ids[2]}:1"])
    reading = asyncio.create_task(held.read("/api/events", params={"turns": turns}))
    await asyncio.sleep(0)
    held.stage.hold.set()
    items = [json.loads(one.data) for one in await reading]
    assert items[0] == {"type": "opened"}
    assert {item["type"] for item in items[1:]} == {"turn"}
    for place, id in enumerate(ids):
        alone = [json.loads(one.data) for one in await held.read(f"/api/turns/{id}/events")]
        mine = [{"number": item["number"], "event": item["event"]} for item in items[1:] if item["turn"] == id]
        after = 1 if place == 2 else 0
        assert [one for one in mine if is_numbered(one)] == [one for one in alone if is_numbered(one)][after:]
        assert mine[-1] == alone[-1]


def is_numbered(entry: dict[str, Any]) -> bool:
    return entry["event"]["type"] not in ("waiting", "started", "snapshot", "finished", "failed")


async def test_turns_are_added_by_a_new_stream_and_nothing_is_lost_or_doubled(held: Scene) -> None:
    chat = held.stage.chat
    talk = await chat.create()
    first = await chat.say(talk.id, None, user("Wave!"))
    seen: dict[str, list[int]] = {}
    place: dict[str, int] = {first.reply.id: 0}

    def take(sent: list[Sent]) -> None:
        for item in (json.loads(one.data) for one in sent):
            if item["type"] == "turn" and is_numbered(item):
                seen.setdefault(item["turn"], []).append(item["number"])
                place[item["turn"]] = item["number"]

    asked = {"turns": [{"turn": first.reply.id, "after": 0}]}
    take(await held.read("/api/events", 3, method="POST", json=asked))
    second = await chat.reply(talk.id, first.message.id)
    place[second.id] = 0
    held.stage.hold.set()
    asked = {"turns": [{"turn": turn, "after": after} for turn, after in place.items()]}
    take(await held.read("/api/events", method="POST", json=asked))
    for turn, numbers in seen.items():
        whole = await held.read(f"/api/turns/{turn}/events")
        assert numbers == list(range(1, len(numbered(whole)) + 1))
    assert set(seen) == {first.reply.id, second.id}


async def test_changes_and_turns_share_a_stream(shown: Scene) -> None:
    chat = shown.stage.chat
    async with shown.http.stream("GET", "/api/events", params={"changes": "true"}) as answer:
        items = sent_by(answer)
        assert json.loads((await anext(items)).data) == {"type": "opened"}
        talk = await chat.create(title="Trees")
        change = json.loads((await anext(items)).data)
        assert change == {
            "type": "change",
            "change": {"conversation_id": talk.id, "what": "created", "message_id": None},
        }
        said = await chat.say(talk.id, None, user("Wave!"))
        told = []
        while "ended" not in told:
            told.append(json.loads((await anext(items)).data)["change"]["what"])
        assert told == ["message", "turn", "ended"]
        assert (await chat.message(said.reply.id)).text == ANSWER


async def test_a_turn_that_cannot_be_read_leaves_the_others_alone(shown: Scene) -> None:
    said = await shown.said()
    await shown.read(f"/api/turns/{said.reply.id}/events")
    turns = f"nonsense,{said.reply.id}:100000,{said.reply.id}:1"
    items = [json.loads(one.data) for one in await shown.read("/api/events", params={"turns": turns})]
    refused = {item["error"]["name"] for item in items if item["type"] == "refused"}
    assert refused == {"not_found", "bad_parameter"}
    told = [item["event"]["type"] for item in items if item["type"] == "turn"]
    assert told[-1] == "finished"


async def test_a_number_beyond_the_end_is_refused(shown: Scene) -> None:
    said = await shown.said()
    await shown.read(f"/api/turns/{said.reply.id}/events")
    for asked in ({"headers": {"last-event-id": "100000"}}, {"params": {"after": 100000}}):
        answer = await shown.http.get(f"/api/turns/{said.reply.id}/events", **asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_what_is_no_number_is_refused(shown: Scene) -> None:
    said = await shown.said()
    path = f"/api/turns/{said.reply.id}/events"
    for last in ("x", "-1", "1.5", "9" * 30, "²"):
        answer = await shown.http.get(path, headers={b"last-event-id": last.encode()})
        assert answer.status_code == 400, answer.text
        assert (await shown.http.get(path, params={"after": last})).status_code == 400
        assert (await shown.http.get("/api/events", params={"turns": f"{said.reply.id}:{last}"})).status_code == 400
    assert (await shown.http.get(path, headers={"last-event-id": ""})).status_code == 400
    too_many = {"turns": ",".join(["x"] * 1000)}
    assert (await shown.http.get("/api/events", params=too_many)).status_code == 400


async def test_a_stream_of_nothing_ends(shown: Scene) -> None:
    assert [json.loads(one.data) for one in await shown.read("/api/events")] == [{"type": "opened"}]


async def test_a_turn_goes_on_when_its_reader_leaves(held: Scene) -> None:
    said = await held.said()
    await held.read(f"/api/turns/{said.reply.id}/events", 1)
    held.stage.hold.set()
    whole = await held.read(f"/api/turns/{said.reply.id}/events")
    assert json.loads(whole[-1].data)["event"]["finish"] == "end"
    assert held.stage.service.store.replies.token_ids(said.reply.id) == tuple(WAVE)


async def test_streams_end_when_the_server_closes(tmp_path: Path) -> None:
    async with staged(tmp_path, held=True) as stage:
        app = Server(stage.service, ServerSettings())
        await stage.chat.ready()
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            here = Scene(stage, http)
            said = await here.said()
            turn = asyncio.create_task(here.read(f"/api/turns/{said.reply.id}/events"))
            changes = asyncio.create_task(here.read("/api/events", params={"changes": "true"}))
            async with stage.chat.events(said.reply.id) as entries:
                async for entry in entries:
                    if entry.number:
                        break
            await app.close(grace=0)
            assert (await changes)[-1].event == "closing"
            assert "can be continued" in json.loads((await turn)[-1].data)["event"]["error"]


async def test_a_long_reply_is_told_whole_to_a_slow_reader(tmp_path: Path) -> None:
    words = " ".join(["word"] * 150)
    long = reply("so", words)
    async with scene(tmp_path, [long]) as shown:
        said = await shown.said()
        path = f"/api/turns/{said.reply.id}/events"
        decoder, text = Decoder(), ""
        async with shown.http.stream("GET", path) as answer:
            async for chunk in answer.aiter_bytes(64):
                for sent in decoder.feed(chunk):
                    event = json.loads(sent.data)["event"]
                    text += event["text"] if event["type"] == "answer_delta" else ""
        assert text == words
