"""A turn outlives its sockets: it can be resumed, stopped, and it frees its slot when its client closes the socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from websockets.frames import Opcode

from palaver.generation import Queued
from palaver.server.socket import registry
from tests.chat.scripted_service import OTHER, TOKENIZER, WAVE, reply
from tests.scripted_engine import FailScript, HoldScript, Script
from tests.server.socket.client import ScriptedServer, SocketClient, connect_client, scripted_server, texts

USER = [{"role": "user", "content": "Wave!"}]
FOREVER = 3600.0
CUTS = 50


def words(count: int) -> list[int]:
    return reply("so", " ".join(f"word{place}" for place in range(count)))


async def read_whole(server: ScriptedServer, turn: str) -> list[dict[str, Any]]:
    """All messages of the turn."""
    async with connect_client(server.url) as client:
        return await client.request(type="resume", turn_id=turn, after=0)


async def test_fifty_cuts_with_resume_lose_and_double_nothing(tmp_path: Path) -> None:
    tokens = words(120)
    gates = [asyncio.Event() for _ in range(CUTS)]
    part = len(tokens) // (CUTS + 1)
    script: list[Any] = []
    for place, gate in enumerate(gates):
        script += [*tokens[place * part : (place + 1) * part], HoldScript(gate)]
    script += tokens[CUTS * part :]
    read: list[dict[str, Any]] = []
    cuts, turn = 0, ""
    async with scripted_server(tmp_path, [script], socket_grace_seconds=FOREVER) as it:
        while not read or read[-1]["type"] != "done":
            async with connect_client(it.url) as client:
                if turn:
                    await client.send(type="resume", turn_id=turn, after=read[-1]["seq"])
                else:
                    await client.send(messages=USER, enable_thinking=True, generation={"max_new_tokens": 4000})
                read.append(await client.receive())
                turn = turn or read[0]["turn_id"]
                if cuts < CUTS:
                    client.abort()
                    gates[cuts].set()
                    cuts += 1
                else:
                    read += await client.receive_turn()
        assert cuts == CUTS
        assert [message["seq"] for message in read] == list(range(1, len(read) + 1))
        assert read == await read_whole(it, turn)
        assert read[-1]["text"] == texts(read) == " ".join(f"word{place}" for place in range(120))
        assert read[-1]["finish_reason"] == "stop"
        assert len(it.engine.calls) == 1, "it was said once"


async def test_every_place_can_be_come_back_to(tmp_path: Path) -> None:
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER, enable_thinking=True)
        for after in range(len(received)):
            assert await client.request(type="resume", turn_id=received[0]["turn_id"], after=after) == received[after:]
        too_far = await client.expect_error(type="resume", turn_id=received[0]["turn_id"], after=len(received) + 1)
        assert f"{len(received)} messages" in too_far


async def test_a_turn_that_is_whole_is_told_to_its_end_only(tmp_path: Path) -> None:
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER)
        await client.send(type="resume", turn_id=received[0]["turn_id"], after=len(received))
        again = await client.request(messages=USER)  # no message is left to send, so the socket is free
        assert again[0]["type"] == "prefill_done"


async def test_two_sockets_read_one_turn(tmp_path: Path) -> None:
    held = scripted_server(tmp_path, held=True, socket_grace_seconds=FOREVER)
    async with held as it, connect_client(it.url) as one, connect_client(it.url) as two:
        await one.send(messages=USER, enable_thinking=True)
        first = await one.receive()
        await two.send(type="resume", turn_id=first["turn_id"], after=0)
        assert await two.receive() == first
        await one.socket.close()
        it.stage.hold.set()
        received = [first, *await two.receive_turn()]
        assert received[-1]["finish_reason"] == "stop", "the other one still reads it"
        assert received == await read_whole(it, first["turn_id"])


async def test_a_stop_ends_within_a_step(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, held=True) as it, connect_client(it.url) as client:
        await client.send(messages=USER, enable_thinking=True)
        received = await client.receive_many(2)
        await client.send(type="stop")
        received += await client.receive_turn()
        assert received[-1]["finish_reason"] == "stopped"
        assert received[-1]["generated_tokens"] == 4, "not one more than there were"
        assert received[-1]["thinking"] == texts(received, "thinking_delta")
        await client.send(type="stop")  # nothing runs any more
        await client.send(messages=USER, enable_thinking=True)
        assert (await client.receive())["type"] == "prefill_done"


async def test_how_a_turn_waits_is_told_beside_the_numbers(tmp_path: Path) -> None:
    gate = asyncio.Event()
    put_back: Script = [Queued(2, 1.5), HoldScript(gate), *WAVE]
    async with scripted_server(tmp_path, [put_back], socket_grace_seconds=FOREVER) as it:
        async with connect_client(it.url) as client:
            await client.send(messages=USER)
            first, queued = await client.receive_many(2)
            assert (queued["type"], queued["position"], queued["estimated_wait_s"]) == ("queued", 2, 1.5)
            assert (queued["seq"], queued["turn_id"]) == (first["seq"], first["turn_id"])
            client.abort()
        async with connect_client(it.url) as client:
            await client.send(type="resume", turn_id=queued["turn_id"], after=1)
            assert await client.receive() == queued, "a client that resumes gets the status again"
            gate.set()
            assert (await client.receive())["seq"] == 2
            assert (await client.receive_turn())[-1]["finish_reason"] == "stop"


async def test_a_vanished_client_frees_its_slot_after_the_grace(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, held=True, socket_grace_seconds=0.05) as it:
        async with connect_client(it.url) as client:
            await client.send(messages=USER, enable_thinking=True)
            received = await client.receive_many(2)
            client.abort()
        await it.wait_idle()
        again = await read_whole(it, received[0]["turn_id"])
        assert again[:2] == received
        assert again[-1]["finish_reason"] == "stopped"


async def test_a_turn_whose_socket_was_cut_goes_on_for_a_while(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, held=True, socket_grace_seconds=FOREVER) as it:
        async with connect_client(it.url) as client:
            await client.send(messages=USER, enable_thinking=True)
            first = await client.receive()
            client.abort()
        it.stage.hold.set()
        assert (await read_whole(it, first["turn_id"]))[-1]["finish_reason"] == "stop"


async def close_without_code(client: SocketClient) -> None:
    """A close frame without a code, as browsers send it for `close()`."""
    client.socket.transport.write(_empty_close())
    await client.wait_closed()


def _empty_close() -> bytes:
    mask = b"\0\0\0\0"
    return bytes((0x80 | Opcode.CLOSE, 0x80)) + mask


@pytest.mark.parametrize("code", [1000, 1001, None])
async def test_a_goodbye_frees_the_slot_at_once(tmp_path: Path, code: int | None) -> None:
    async with scripted_server(tmp_path, held=True, socket_grace_seconds=FOREVER) as it:
        async with connect_client(it.url) as client:
            await client.send(messages=USER, enable_thinking=True)
            first = await client.receive()
            if code is None:
                await close_without_code(client)
            else:
                await client.socket.close(code)
        await it.wait_idle()
        assert (await read_whole(it, first["turn_id"]))[-1]["finish_reason"] == "stopped"


async def test_a_close_with_another_code_is_no_goodbye(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, held=True, socket_grace_seconds=FOREVER) as it:
        async with connect_client(it.url) as client:
            await client.send(messages=USER, enable_thinking=True)
            first = await client.receive()
            await client.socket.close(4000, "I'll be back")
        it.stage.hold.set()
        assert (await read_whole(it, first["turn_id"]))[-1]["finish_reason"] == "stop"


async def test_a_second_request_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with scripted_server(tmp_path, held=True) as it, connect_client(it.url) as client:
        await client.send(messages=USER, enable_thinking=True)
        first = await client.receive()
        assert (await client.receive())["thinking_delta"] == ""
        assert (await client.receive())["thinking_delta"]
        for second in ({"messages": USER}, {"type": "resume", "turn_id": first["turn_id"], "after": 0}):
            await client.send(**second)
            error = await client.receive()
            assert (error["type"], error["seq"]) == ("error", 0)
            assert first["turn_id"] in error["error"]
            assert "turn_id" not in error, "it belongs to no turn"
        it.stage.hold.set()
        assert (await client.receive_turn())[-1]["finish_reason"] == "stop"
        assert len(it.engine.calls) == 1


async def test_an_engine_that_fails_ends_the_turn_with_an_error(tmp_path: Path) -> None:
    fails: Script = [*WAVE[:6], FailScript()]
    async with scripted_server(tmp_path, [fails, OTHER]) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER, enable_thinking=True)
        assert (received[-1]["type"], received[-1]["error"]) == ("error", "The script says to fail here.")
        assert received[-1]["turn_id"] == received[0]["turn_id"]
        assert received == await read_whole(it, received[0]["turn_id"])
        assert (await client.request(messages=USER))[-1]["type"] == "done", "the socket lives"


async def test_turns_are_forgotten_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_RETAINED_SIZE", 1000)
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        first = (await client.request(messages=USER))[0]["turn_id"]
        assert (await client.request(type="resume", turn_id=first, after=0))[-1]["type"] == "done"
        for _ in range(3):
            last = (await client.request(messages=USER))[0]["turn_id"]
        assert first in await client.expect_error(type="resume", turn_id=first, after=0)
        assert (await client.request(type="resume", turn_id=last, after=0))[-1]["type"] == "done"


async def test_the_server_ends_a_turn_and_says_so(tmp_path: Path) -> None:
    async with (
        scripted_server(tmp_path, held=True) as it,
        connect_client(it.url) as client,
        connect_client(it.url) as idle,
    ):
        await client.send(messages=USER, enable_thinking=True)
        await client.receive_many(2)
        await it.server.close(grace=0)
        assert "shutting down" in (await client.receive_turn())[-1]["error"]
        assert (await client.wait_closed())[0] == 1001
        assert (await idle.wait_closed())[0] == 1001


async def test_what_is_asked_reaches_the_engine(tmp_path: Path) -> None:
    given = {"max_new_tokens": 99, "length_penalty": 1.3, "top_k": 5, "seed": 7, "stop": ["x"], "banned_ids": [3]}
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        await client.request(messages=USER)
        sampling = it.engine.calls[-1].sampling
        assert (sampling.max_tokens, sampling.end_penalty) == (256, 1.1), "the protocol's own defaults"
        await client.request(messages=[{"role": "system", "content": "Be kind."}, *USER], generation=given)
        sampling = it.engine.calls[-1].sampling
        assert (sampling.max_tokens, sampling.end_penalty, sampling.top_k) == (99, 1.3, 5)
        assert (sampling.seed, sampling.stop, sampling.banned_ids) == (7, ("x",), (3,))
        prompt = b"".join(TOKENIZER.vocabulary[id] for id in it.engine.calls[-1].prompt.context_ids).decode()
        assert prompt.index("Be kind.") < prompt.index("Wave!")
