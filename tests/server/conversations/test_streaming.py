"""Event streams of turns: cut anywhere, resumed by number, many in one."""

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
from palaver.chat.turn_log import LogEntry
from palaver.client.sse import ServerSentEvent, SseDecoder
from palaver.encoding import adapter
from palaver.events import Finished, fold
from palaver.messages import assistant, user
from palaver.server.app import Server
from palaver.server.settings import ServerSettings
from tests.chat.scripted_service import OTHER, WAVE, Stage, open_stage, reply
from tests.client.live import listening, served
from tests.scripted_engine import HoldScript, Script

THOUGHT, ANSWER = "think 👋", "Wave: 👋🏽 <think"


@dataclass
class StreamClient:
    stage: Stage
    http: httpx.AsyncClient

    async def send_message(self) -> SentMessage:
        talk = await self.stage.chat.create_conversation()
        return await self.stage.chat.send_message(talk.id, None, user("Wave!"))

    async def read(
        self, path: str, count: int | None = None, last: str | None = None, **more: Any
    ) -> list[ServerSentEvent]:
        """The events of a stream: all, or the first `count`, after which the connection is closed."""
        headers = {} if last is None else {"last-event-id": last}
        async with self.http.stream(more.pop("method", "GET"), path, headers=headers, **more) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async with aclosing(parse_events(answer)) as sent:
                read: list[ServerSentEvent] = []
                while count is None or len(read) < count:
                    try:
                        read.append(await anext(sent))
                    except StopAsyncIteration:
                        break
                return read


async def parse_events(answer: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
    decoder = SseDecoder()
    async for chunk in answer.aiter_bytes():
        for sent in decoder.feed(chunk):
            yield sent


@asynccontextmanager
async def stream_client(
    folder: Path, scripts: list[Script] | None = None, held: bool = False
) -> AsyncIterator[StreamClient]:
    async with (
        open_stage(folder, scripts or (WAVE, OTHER), held=held) as stage,
        served(stage.service) as url,
        httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
    ):
        await stage.chat.wait_until_ready()
        yield StreamClient(stage, http)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[StreamClient]:
    async with stream_client(tmp_path) as it:
        yield it


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[StreamClient]:
    async with stream_client(tmp_path, held=True) as it:
        yield it
        it.stage.hold.set()


def numbered(sent: list[ServerSentEvent]) -> list[str]:
    """The data of events that have a number of their own."""
    without = ("waiting", "started", "snapshot", "finished", "failed")
    return [one.data for one in sent if json.loads(one.data)["event"]["type"] not in without]


async def test_an_ended_turn_is_told_again_from_every_number(client: StreamClient) -> None:
    sent_message = await client.send_message()
    path = f"/api/turns/{sent_message.reply.id}/events"
    all_events = await client.read(path)
    entries = [adapter(LogEntry).validate_json(one.data) for one in all_events]
    assert fold(entry.event for entry in entries).message == assistant(ANSWER, THOUGHT)
    assert isinstance(entries[-1].event, Finished)
    assert [one.id for one in all_events] == [str(entry.number) for entry in entries]
    for cut in range(1, len(all_events) + 1):
        first = await client.read(path, cut)
        rest = await client.read(path, last=first[-1].id)
        assert numbered(first) + numbered(rest) == numbered(all_events)
        assert rest[-1] == all_events[-1]
    assert await client.read(path, params={"after": 2}) == await client.read(path, last="2", params={"after": 0})


async def test_a_running_turn_is_cut_and_resumed_at_every_event(tmp_path: Path) -> None:
    gates = [asyncio.Event() for _ in WAVE]
    script = [item for token, gate in zip(WAVE, gates, strict=True) for item in (token, HoldScript(gate))]
    async with stream_client(tmp_path, [script]) as running:
        sent_message = await running.send_message()
        path = f"/api/turns/{sent_message.reply.id}/events"
        events: list[ServerSentEvent] = []
        last = "0"
        opened = iter(gates)
        while not events or '"finished"' not in events[-1].data:
            reading = asyncio.create_task(next_new(running, path, last))
            while not reading.done():  # the engine goes on only if no new event arrives
                done, _ = await asyncio.wait([reading], timeout=0.02)
                if not done and (gate := next(opened, None)):
                    gate.set()
            events.append(reading.result())
            last = events[-1].id or last
        all_events = await running.read(path)
        assert numbered(events) == numbered(all_events)
        assert events[-1] == all_events[-1]


async def next_new(running: StreamClient, path: str, last: str) -> ServerSentEvent:
    """Connects, reads one new event and disconnects."""
    async with running.http.stream("GET", path, headers={"last-event-id": last}) as answer:
        async for sent in parse_events(answer):
            if sent.id != last or '"finished"' in sent.data:
                return sent
    raise AssertionError("the stream ended without a word")


async def test_many_turns_come_in_one_stream(held: StreamClient) -> None:
    chat = held.stage.chat
    talk = await chat.create_conversation()
    first = await chat.send_message(talk.id, None, user("Wave!"))
    second = await chat.start_reply(talk.id, first.message.id)
    third = await chat.start_reply(talk.id, first.message.id)
    ids = [first.reply.id, second.id, third.id]
    turns = ",".join([f"{ids[0]}:0", ids[1], f"{ids[2]}:1"])
    held.stage.hold.set()
    async with chat.events(ids[2]) as entries:  # until there is an event to go on behind
        while (await anext(entries)).number != 1:
            pass
    items = [json.loads(one.data) for one in await held.read("/api/events", params={"turns": turns})]
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


async def test_turns_are_added_by_a_new_stream_and_nothing_is_lost_or_doubled(held: StreamClient) -> None:
    chat = held.stage.chat
    talk = await chat.create_conversation()
    first = await chat.send_message(talk.id, None, user("Wave!"))
    events: dict[str, list[int]] = {}
    place: dict[str, int] = {first.reply.id: 0}

    def record(sent: list[ServerSentEvent]) -> None:
        for item in (json.loads(one.data) for one in sent):
            if item["type"] == "turn" and is_numbered(item):
                events.setdefault(item["turn"], []).append(item["number"])
                place[item["turn"]] = item["number"]

    request = {"turns": [{"turn": first.reply.id, "after": 0}]}
    record(await held.read("/api/events", 3, method="POST", json=request))
    second = await chat.start_reply(talk.id, first.message.id)
    place[second.id] = 0
    held.stage.hold.set()
    request = {"turns": [{"turn": turn, "after": after} for turn, after in place.items()]}
    record(await held.read("/api/events", method="POST", json=request))
    for turn, numbers in events.items():
        all_events = await held.read(f"/api/turns/{turn}/events")
        assert numbers == list(range(1, len(numbered(all_events)) + 1))
    assert set(events) == {first.reply.id, second.id}


async def test_changes_and_turns_share_a_stream(client: StreamClient) -> None:
    chat = client.stage.chat
    async with client.http.stream("GET", "/api/events", params={"changes": "true"}) as answer:
        items = parse_events(answer)
        assert json.loads((await anext(items)).data) == {"type": "opened"}
        talk = await chat.create_conversation(title="Trees")
        change = json.loads((await anext(items)).data)
        assert change == {
            "type": "change",
            "change": {"conversation_id": talk.id, "what": "created", "message_id": None},
        }
        sent_message = await chat.send_message(talk.id, None, user("Wave!"))
        received = []
        while "ended" not in received:
            received.append(json.loads((await anext(items)).data)["change"]["what"])
        assert received == ["message", "turn", "ended"]
        assert (await chat.message(sent_message.reply.id)).text == ANSWER


async def test_a_turn_that_cannot_be_read_leaves_the_others_alone(client: StreamClient) -> None:
    sent_message = await client.send_message()
    await client.read(f"/api/turns/{sent_message.reply.id}/events")
    turns = f"nonsense,{sent_message.reply.id}:100000,{sent_message.reply.id}:1"
    items = [json.loads(one.data) for one in await client.read("/api/events", params={"turns": turns})]
    refused = {item["error"]["name"] for item in items if item["type"] == "refused"}
    assert refused == {"not_found", "bad_parameter"}
    received = [item["event"]["type"] for item in items if item["type"] == "turn"]
    assert received[-1] == "finished"


async def test_a_number_beyond_the_end_is_refused(client: StreamClient) -> None:
    sent_message = await client.send_message()
    await client.read(f"/api/turns/{sent_message.reply.id}/events")
    for request in ({"headers": {"last-event-id": "100000"}}, {"params": {"after": 100000}}):
        answer = await client.http.get(f"/api/turns/{sent_message.reply.id}/events", **request)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_what_is_no_number_is_refused(client: StreamClient) -> None:
    sent_message = await client.send_message()
    path = f"/api/turns/{sent_message.reply.id}/events"
    for last in ("x", "-1", "1.5", "9" * 30, "²"):
        answer = await client.http.get(path, headers={b"last-event-id": last.encode()})
        assert answer.status_code == 400, answer.text
        assert (await client.http.get(path, params={"after": last})).status_code == 400
        assert (
            await client.http.get("/api/events", params={"turns": f"{sent_message.reply.id}:{last}"})
        ).status_code == 400
    assert (await client.http.get(path, headers={"last-event-id": ""})).status_code == 400
    too_many = {"turns": ",".join(["x"] * 1000)}
    assert (await client.http.get("/api/events", params=too_many)).status_code == 400


async def test_a_stream_of_nothing_ends(client: StreamClient) -> None:
    assert [json.loads(one.data) for one in await client.read("/api/events")] == [{"type": "opened"}]


async def test_a_turn_goes_on_when_its_reader_leaves(held: StreamClient) -> None:
    sent_message = await held.send_message()
    await held.read(f"/api/turns/{sent_message.reply.id}/events", 1)
    held.stage.hold.set()
    all_events = await held.read(f"/api/turns/{sent_message.reply.id}/events")
    assert json.loads(all_events[-1].data)["event"]["finish"] == "end"
    assert held.stage.service.store.replies.token_ids(sent_message.reply.id) == tuple(WAVE)


async def test_streams_end_when_the_server_closes(tmp_path: Path) -> None:
    async with open_stage(tmp_path, held=True) as stage:
        app = Server(stage.service, ServerSettings())
        await stage.chat.wait_until_ready()
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            here = StreamClient(stage, http)
            sent_message = await here.send_message()
            turn = asyncio.create_task(here.read(f"/api/turns/{sent_message.reply.id}/events"))
            changes = asyncio.create_task(here.read("/api/events", params={"changes": "true"}))
            async with stage.chat.events(sent_message.reply.id) as entries:
                async for entry in entries:
                    if entry.number:
                        break
            await app.close(grace=0)
            assert (await changes)[-1].event == "closing"
            assert "can be continued" in json.loads((await turn)[-1].data)["event"]["error"]


async def test_a_turn_that_is_left_for_another_server_has_not_failed(tmp_path: Path) -> None:
    async with open_stage(tmp_path, held=True, resume=True) as stage:
        app = Server(stage.service, ServerSettings())
        await stage.chat.wait_until_ready()
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            here = StreamClient(stage, http)
            id = (await here.send_message()).reply.id
            alone = asyncio.create_task(here.read(f"/api/turns/{id}/events"))
            among = asyncio.create_task(here.read("/api/events", params={"turns": id}))
            async with stage.chat.events(id) as entries:
                async for entry in entries:
                    if entry.number:
                        break
            await app.close(grace=0)
            for read in (await alone, await among):
                assert read[-1].event == "closing"
                assert not any('"failed"' in one.data for one in read)
            assert stage.service.store.replies.holder(id) == stage.service.turns.lease.id, "it still runs"


async def test_a_long_reply_is_told_whole_to_a_slow_reader(tmp_path: Path) -> None:
    words = " ".join(["word"] * 150)
    long = reply("so", words)
    async with stream_client(tmp_path, [long]) as client:
        sent_message = await client.send_message()
        path = f"/api/turns/{sent_message.reply.id}/events"
        decoder, text = SseDecoder(), ""
        async with client.http.stream("GET", path) as answer:
            async for chunk in answer.aiter_bytes(64):
                for sent in decoder.feed(chunk):
                    event = json.loads(sent.data)["event"]
                    text += event["text"] if event["type"] == "answer_delta" else ""
        assert text == words
