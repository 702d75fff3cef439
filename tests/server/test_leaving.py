"""A client that leaves while the first word of its answer is waited for: its slot is free again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.server.app import Server
from palaver.server.openai import disconnect
from palaver.server.settings import ServerSettings
from tests.chat.making import WAVE, staged
from tests.client.live import listening
from tests.scripted_engine import HoldScript

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Wave!"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Wave!"}], "max_tokens": 100}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_slot_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    """The engine says nothing at all, so that the stream begins before the first word is there."""
    monkeypatch.setattr(disconnect, "FIRST_SECONDS", 0.01)
    hold = asyncio.Event()
    async with staged(tmp_path, [[HoldScript(hold), *WAVE]]) as stage:
        await stage.chat.ready()
        app = Server(stage.service, ServerSettings())
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            async with http.stream("POST", path, json={**body, "stream": True}) as answer:
                await anext(answer.aiter_lines())
                assert len(app.state.floor) == 1
            async with asyncio.timeout(120):
                while len(app.state.floor):
                    await asyncio.sleep(0.005)
    assert "already running" not in caplog.text
