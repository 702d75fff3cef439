"""The opening chunk comes before the first token: the role, and a thought that the prompt opens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from palaver.engines.core.reply_state import ReplyState
from palaver.generation import Output, Prompt
from tests.scripted_engine import ScriptedEngine
from tests.server.chat_client import CHAT, SUM
from tests.server.scripted_server import ANSWER, END, say, scripted_client
from tests.tiny import PREOPENED

SCRIPT = say("so\n", ANSWER, "\n\nyes", END)
NEW = {"metadata": {"conversation": "new"}}


class SlowPrefillEngine(ScriptedEngine):
    """Reads its prompts until the event is set, like a model with a long one: it says nothing at all."""

    read: asyncio.Event

    async def _outputs(
        self, prompt: Prompt, reply: ReplyState, own_ids: list[int], stopped: asyncio.Event
    ) -> AsyncGenerator[Output]:
        await self.read.wait()
        async for output in super()._outputs(prompt, reply, own_ids, stopped):
            yield output


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    event = asyncio.Event()
    monkeypatch.setattr(SlowPrefillEngine, "read", event, raising=False)
    return event


@pytest.mark.parametrize(
    ("path", "body", "opens"),
    [
        (CHAT, {"messages": SUM}, '"reasoning_content":""'),
        (CHAT, {"messages": SUM, **NEW}, '"reasoning_content":""'),
        ("/v1/messages", {"messages": SUM, "max_tokens": 50}, '"type":"thinking"'),
        ("/v1/messages", {"messages": SUM, "max_tokens": 50, **NEW}, '"type":"thinking"'),
        ("/v1/responses", {"input": "Hello"}, '"type":"reasoning"'),
        ("/v1/responses", {"input": "Hello", "store": False}, '"type":"reasoning"'),
    ],
)
async def test_over_http(tmp_path: Path, read: asyncio.Event, path: str, body: dict[str, Any], opens: str) -> None:
    before, after = "", ""
    async with (
        asyncio.timeout(60),
        scripted_client(tmp_path, PREOPENED, SCRIPT, engine=SlowPrefillEngine) as http,
        http.stream("POST", path, json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        async for text in answer.aiter_text():
            if read.is_set():
                after += text
                continue
            before += text
            if opens in before.replace(": ", ":"):
                read.set()
    assert "[DONE]" in after or "message_stop" in after or "response.completed" in after


async def test_a_thought_that_is_not_shown_is_not_opened(tmp_path: Path, read: asyncio.Event) -> None:
    read.set()
    async with scripted_client(tmp_path, PREOPENED, SCRIPT, engine=SlowPrefillEngine) as http:
        for how in ({"include_reasoning": False}, {"reasoning_format": "none"}):
            answer = await http.post(CHAT, json={"messages": SUM, "stream": True, **how})
            first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}


async def test_over_the_socket(tmp_path: Path, read: asyncio.Event) -> None:
    async with asyncio.timeout(60), scripted_client(tmp_path, PREOPENED, SCRIPT, engine=SlowPrefillEngine) as http:
        url = str(http.base_url).replace("http", "ws", 1).rstrip("/")
        async with connect(f"{url}/ws/chat", proxy=None) as socket:
            await socket.send(json.dumps({"messages": SUM, "enable_thinking": True}))
            first = json.loads(await socket.recv())
            assert first == {"type": "chunk", "text_delta": "", "thinking_delta": "", "seq": 1}
            read.set()
            assert json.loads(await socket.recv())["type"] == "prefill_done"
            while (message := json.loads(await socket.recv()))["type"] != "done":
                pass
            assert (message["thinking"].strip(), message["text"]) == ("so", "yes")
