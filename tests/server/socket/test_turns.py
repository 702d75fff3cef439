"""A turn lives on its own: cut sockets come back to it, a stop ends it, and nobody who left for good holds it up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from websockets.frames import Opcode

from palaver.generation import Queued
from palaver.server.socket import registry
from tests.chat.making import OTHER, TOKENIZER, WAVE, reply
from tests.scripted_engine import FailScript, HoldScript, Script
from tests.server.socket.talk import Scene, Talk, scene, talking, texts

USER = [{"role": "user", "content": "Wave!"}]
FOREVER = 3600.0
CUTS = 50


def words(count: int) -> list[int]:
    return reply("so", " ".join(f"word{place}" for place in range(count)))


async def whole(scene: Scene, turn: str) -> list[dict[str, Any]]:
    """The turn as somebody reads it who missed nothing."""
    async with talking(scene.url) as talk:
        return await talk.ask(type="resume", turn_id=turn, after=0)


async def test_fifty_cuts_with_resume_lose_and_double_nothing(tmp_path: Path) -> None:
    said = words(120)
    gates = [asyncio.Event() for _ in range(CUTS)]
    part = len(said) // (CUTS + 1)
    script: list[Any] = []
    for place, gate in enumerate(gates):
        script += [*said[place * part : (place + 1) * part], HoldScript(gate)]
    script += said[CUTS * part :]
    read: list[dict[str, Any]] = []
    cuts, turn = 0, ""
    async with scene(tmp_path, [script], socket_grace_seconds=FOREVER) as it:
        while not read or read[-1]["type"] != "done":
            async with talking(it.url) as talk:
                if turn:
                    await talk.send(type="resume", turn_id=turn, after=read[-1]["seq"])
                else:
                    await talk.send(messages=USER, enable_thinking=True, generation={"max_new_tokens": 4000})
                read.append(await talk.next())
                turn = turn or read[0]["turn_id"]
                if cuts < CUTS:
                    talk.cut()
                    gates[cuts].set()
                    cuts += 1
                else:
                    read += await talk.rest()
        assert cuts == CUTS
        assert [message["seq"] for message in read] == list(range(1, len(read) + 1))
        assert read == await whole(it, turn)
        assert read[-1]["text"] == texts(read) == " ".join(f"word{place}" for place in range(120))
        assert read[-1]["finish_reason"] == "stop"
        assert len(it.engine.calls) == 1, "it was said once"


async def test_every_place_can_be_come_back_to(tmp_path: Path) -> None:
    async with scene(tmp_path) as it, talking(it.url) as talk:
        told = await talk.ask(messages=USER, enable_thinking=True)
        for after in range(len(told)):
            assert await talk.ask(type="resume", turn_id=told[0]["turn_id"], after=after) == told[after:]
        too_far = await talk.refused(type="resume", turn_id=told[0]["turn_id"], after=len(told) + 1)
        assert f"{len(told)} messages" in too_far


async def test_a_turn_that_is_whole_is_told_to_its_end_only(tmp_path: Path) -> None:
    async with scene(tmp_path) as it, talking(it.url) as talk:
        told = await talk.ask(messages=USER)
        await talk.send(type="resume", turn_id=told[0]["turn_id"], after=len(told))
        again = await talk.ask(messages=USER)  # nothing is left to tell, so the socket is free
        assert again[0]["type"] == "prefill_done"


async def test_two_sockets_read_one_turn(tmp_path: Path) -> None:
    held = scene(tmp_path, held=True, socket_grace_seconds=FOREVER)
    async with held as it, talking(it.url) as one, talking(it.url) as two:
        await one.send(messages=USER, enable_thinking=True)
        first = await one.next()
        await two.send(type="resume", turn_id=first["turn_id"], after=0)
        assert await two.next() == first
        await one.socket.close()
        it.stage.hold.set()
        told = [first, *await two.rest()]
        assert told[-1]["finish_reason"] == "stop", "the other one still reads it"
        assert told == await whole(it, first["turn_id"])


async def test_a_stop_ends_within_a_step(tmp_path: Path) -> None:
    async with scene(tmp_path, held=True) as it, talking(it.url) as talk:
        await talk.send(messages=USER, enable_thinking=True)
        told = await talk.told(2)
        await talk.send(type="stop")
        told += await talk.rest()
        assert told[-1]["finish_reason"] == "stopped"
        assert told[-1]["generated_tokens"] == 4, "not one more than there were"
        assert told[-1]["thinking"] == texts(told, "thinking_delta")
        await talk.send(type="stop")  # nothing runs any more
        await talk.send(messages=USER, enable_thinking=True)
        assert (await talk.next())["type"] == "prefill_done"


async def test_how_a_turn_waits_is_told_beside_the_numbers(tmp_path: Path) -> None:
    gate = asyncio.Event()
    put_back: Script = [Queued(2, 1.5), HoldScript(gate), *WAVE]
    async with scene(tmp_path, [put_back], socket_grace_seconds=FOREVER) as it:
        async with talking(it.url) as talk:
            await talk.send(messages=USER)
            first, queued = await talk.told(2)
            assert (queued["type"], queued["position"], queued["estimated_wait_s"]) == ("queued", 2, 1.5)
            assert (queued["seq"], queued["turn_id"]) == (first["seq"], first["turn_id"])
            talk.cut()
        async with talking(it.url) as talk:
            await talk.send(type="resume", turn_id=queued["turn_id"], after=1)
            assert await talk.next() == queued, "whoever comes back is told again"
            gate.set()
            assert (await talk.next())["seq"] == 2
            assert (await talk.rest())[-1]["finish_reason"] == "stop"


async def test_a_vanished_client_frees_its_slot_after_the_grace(tmp_path: Path) -> None:
    async with scene(tmp_path, held=True, socket_grace_seconds=0.05) as it:
        async with talking(it.url) as talk:
            await talk.send(messages=USER, enable_thinking=True)
            told = await talk.told(2)
            talk.cut()
        await it.until_free()
        again = await whole(it, told[0]["turn_id"])
        assert again[:2] == told
        assert again[-1]["finish_reason"] == "stopped"


async def test_a_turn_whose_socket_was_cut_goes_on_for_a_while(tmp_path: Path) -> None:
    async with scene(tmp_path, held=True, socket_grace_seconds=FOREVER) as it:
        async with talking(it.url) as talk:
            await talk.send(messages=USER, enable_thinking=True)
            first = await talk.next()
            talk.cut()
        it.stage.hold.set()
        assert (await whole(it, first["turn_id"]))[-1]["finish_reason"] == "stop"


async def say_nothing(talk: Talk) -> None:
    """A close frame without a code, as browsers send it for `close()`."""
    talk.socket.transport.write(_empty_close())
    await talk.ended()


def _empty_close() -> bytes:
    mask = b"\0\0\0\0"
    return bytes((0x80 | Opcode.CLOSE, 0x80)) + mask


@pytest.mark.parametrize("code", [1000, 1001, None])
async def test_a_goodbye_frees_the_slot_at_once(tmp_path: Path, code: int | None) -> None:
    async with scene(tmp_path, held=True, socket_grace_seconds=FOREVER) as it:
        async with talking(it.url) as talk:
            await talk.send(messages=USER, enable_thinking=True)
            first = await talk.next()
            if code is None:
                await say_nothing(talk)
            else:
                await talk.socket.close(code)
        await it.until_free()
        assert (await whole(it, first["turn_id"]))[-1]["finish_reason"] == "stopped"


async def test_a_close_with_another_code_is_no_goodbye(tmp_path: Path) -> None:
    async with scene(tmp_path, held=True, socket_grace_seconds=FOREVER) as it:
        async with talking(it.url) as talk:
            await talk.send(messages=USER, enable_thinking=True)
            first = await talk.next()
            await talk.socket.close(4000, "I'll be back")
        it.stage.hold.set()
        assert (await whole(it, first["turn_id"]))[-1]["finish_reason"] == "stop"


async def test_a_second_request_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with scene(tmp_path, held=True) as it, talking(it.url) as talk:
        await talk.send(messages=USER, enable_thinking=True)
        first = await talk.next()
        assert (await talk.next())["thinking_delta"] == ""
        assert (await talk.next())["thinking_delta"]
        for second in ({"messages": USER}, {"type": "resume", "turn_id": first["turn_id"], "after": 0}):
            await talk.send(**second)
            error = await talk.next()
            assert (error["type"], error["seq"]) == ("error", 0)
            assert first["turn_id"] in error["error"]
            assert "turn_id" not in error, "it belongs to no turn"
        it.stage.hold.set()
        assert (await talk.rest())[-1]["finish_reason"] == "stop"
        assert len(it.engine.calls) == 1


async def test_an_engine_that_fails_ends_the_turn_with_an_error(tmp_path: Path) -> None:
    fails: Script = [*WAVE[:6], FailScript()]
    async with scene(tmp_path, [fails, OTHER]) as it, talking(it.url) as talk:
        told = await talk.ask(messages=USER, enable_thinking=True)
        assert (told[-1]["type"], told[-1]["error"]) == ("error", "The script says to fail here.")
        assert told[-1]["turn_id"] == told[0]["turn_id"]
        assert told == await whole(it, told[0]["turn_id"])
        assert (await talk.ask(messages=USER))[-1]["type"] == "done", "the socket lives"


async def test_turns_are_forgotten_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KEPT_SIZE", 1000)
    async with scene(tmp_path) as it, talking(it.url) as talk:
        first = (await talk.ask(messages=USER))[0]["turn_id"]
        assert (await talk.ask(type="resume", turn_id=first, after=0))[-1]["type"] == "done"
        for _ in range(3):
            last = (await talk.ask(messages=USER))[0]["turn_id"]
        assert first in await talk.refused(type="resume", turn_id=first, after=0)
        assert (await talk.ask(type="resume", turn_id=last, after=0))[-1]["type"] == "done"


async def test_the_server_ends_a_turn_and_says_so(tmp_path: Path) -> None:
    async with scene(tmp_path, held=True) as it, talking(it.url) as talk, talking(it.url) as idle:
        await talk.send(messages=USER, enable_thinking=True)
        await talk.told(2)
        await it.server.close(grace=0)
        assert "shutting down" in (await talk.rest())[-1]["error"]
        assert (await talk.ended())[0] == 1001
        assert (await idle.ended())[0] == 1001


async def test_what_is_asked_reaches_the_engine(tmp_path: Path) -> None:
    given = {"max_new_tokens": 99, "length_penalty": 1.3, "top_k": 5, "seed": 7, "stop": ["x"], "banned_ids": [3]}
    async with scene(tmp_path) as it, talking(it.url) as talk:
        await talk.ask(messages=USER)
        sampling = it.engine.calls[-1].sampling
        assert (sampling.max_tokens, sampling.end_penalty) == (256, 1.1), "the protocol's own defaults"
        await talk.ask(messages=[{"role": "system", "content": "Be kind."}, *USER], generation=given)
        sampling = it.engine.calls[-1].sampling
        assert (sampling.max_tokens, sampling.end_penalty, sampling.top_k) == (99, 1.3, 5)
        assert (sampling.seed, sampling.stop, sampling.banned_ids) == (7, ("x",), (3,))
        asked = b"".join(TOKENIZER.vocabulary[id] for id in it.engine.calls[-1].prompt.context_ids).decode()
        assert asked.index("Be kind.") < asked.index("Wave!")
