"""Authentication of sockets: keys, origins and hosts, as for HTTP requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from palaver.server.auth import KEY_CACHE_SECONDS
from palaver.server.settings import ServerLimits, ServerSettings
from tests.server.live_server import LiveServer
from tests.server.socket.client import SUM, connect_client


@dataclass
class Keyed:
    live: LiveServer
    ann: str
    bob: str


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with LiveServer(tmp_path_factory.mktemp("keyed"), ServerSettings(host="0.0.0.0")) as live:
        store = live.service.store
        ann, bob = (store.keys.add(store.users.ensure(name).id)[1] for name in ("ann", "bob"))
        yield Keyed(live, ann, bob)


async def status(url: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """The status and the error with which the handshake is refused."""
    with pytest.raises(InvalidStatus) as refusal:
        async with connect_client(url, **options):
            pass
    answer = refusal.value.response
    return answer.status_code, json.loads(answer.body)["error"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
async def test_hostile_18_a_foreign_origin_is_turned_away(live: LiveServer, origin: str) -> None:
    received = await status(live.url, origin=origin)
    assert (received[0], received[1]["code"]) == (403, "foreign_caller")


async def test_hostile_18_a_foreign_host_is_turned_away(live: LiveServer) -> None:
    received = await status(f"http://evil.example:{live.port}", host="127.0.0.1", port=live.port)
    assert (received[0], received[1]["code"]) == (403, "foreign_caller")


async def test_the_server_s_own_pages_come_in(live: LiveServer) -> None:
    async with connect_client(live.url, origin=live.url) as client:
        assert (await client.request(messages=SUM))[-1]["type"] == "done"


async def test_pages_that_the_operator_named_come_in(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ServerSettings(origins=("https://chat.example",)), None) as named:
        async with connect_client(named.url, origin="https://chat.example") as client:
            assert "No model is loaded" in await client.expect_error(messages=SUM)
        assert (await status(named.url, origin="https://other.example"))[0] == 403


async def test_hostile_19_without_a_key_nobody_comes_in(keyed: Keyed) -> None:
    received = await status(keyed.live.url)
    assert (received[0], received[1]["code"]) == (401, "invalid_api_key")
    for wrong in ({"authorization": "Bearer nonsense"}, {"x-api-key": keyed.ann + "x"}):
        assert (await status(keyed.live.url, additional_headers=wrong))[0] == 401


async def test_hostile_19_a_key_in_every_place_has_the_same_rights(keyed: Keyed) -> None:
    places: list[dict[str, Any]] = [
        {"additional_headers": {"authorization": f"Bearer {keyed.ann}"}},
        {"additional_headers": {"x-api-key": keyed.ann}},
        {"additional_headers": {"api-key": keyed.ann}},
        {"subprotocols": ["palaver", f"palaver.key.{keyed.ann}"]},
    ]
    turn = ""
    for options in places:
        async with connect_client(keyed.live.url, **options) as client:
            assert client.socket.subprotocol == ("palaver" if "subprotocols" in options else None)
            if not turn:
                turn = (await client.request(messages=SUM))[-1]["turn_id"]
            assert (await client.request(type="resume", turn_id=turn, after=0))[-1]["type"] == "done"


async def test_a_key_in_the_address_is_none(keyed: Keyed) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        async with connect_client(f"{keyed.live.url}/ws/chat?key={keyed.ann}&x="):
            pass
    assert refusal.value.response.status_code == 401


async def test_hostile_20_another_s_turn_is_not_there(keyed: Keyed) -> None:
    mine, other = ({"additional_headers": {"x-api-key": key}} for key in (keyed.ann, keyed.bob))
    async with connect_client(keyed.live.url, **mine) as client:
        turn = (await client.request(messages=SUM))[-1]["turn_id"]
    async with connect_client(keyed.live.url, **other) as client:
        assert await client.expect_error(type="resume", turn_id=turn, after=0) == f"There is no turn {turn!r}."


async def test_a_revoked_key_opens_no_more_turns(keyed: Keyed) -> None:
    store = keyed.live.service.store
    key, text = store.keys.add(store.users.ensure("carl").id)
    async with connect_client(keyed.live.url, additional_headers={"x-api-key": text}) as client:
        assert (await client.request(messages=SUM))[-1]["type"] == "done"
        store.keys.revoke(key.id)
        await asyncio.sleep(KEY_CACHE_SECONDS)
        assert "revoked" in await client.expect_error(messages=SUM)


async def test_turns_count_as_requests(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ServerSettings(limits=ServerLimits(requests_per_minute=3)), None) as limited:
        async with connect_client(limited.url) as client:
            received = [await client.expect_error(messages=SUM) for _ in range(4)]
            assert ["requests a minute" in sentence for sentence in received] == [False, False, True, True]
            await client.send(type="stop")  # a stop is always heard
        assert (await status(limited.url))[0] == 429


async def test_behind_a_proxy_s_prefix(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ServerSettings(prefix="/palaver"), None) as behind:
        for url in (behind.url, f"{behind.url}/palaver"):
            async with connect_client(url) as client:
                assert "No model is loaded" in await client.expect_error(messages=SUM)
