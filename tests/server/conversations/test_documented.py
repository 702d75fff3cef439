"""Every shell line in `docs/http-api.md` works as it is written, with the embedded model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaver.client.http_chat import HttpChat
from palaver.messages import user
from palaver.server.settings import ServerSettings
from palaver.store import Store
from palaver.store.comparisons import ComparedReply
from tests import media_files
from tests.chat.scripted_service import read_entries
from tests.client.live import TOKEN
from tests.server.live_server import LiveServer

DOCUMENT = Path(__file__).parents[3] / "docs" / "http-api.md"


def lines() -> list[str]:
    section = DOCUMENT.read_text().split("\n## Conversations\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


async def prepare(url: str, store: Store) -> dict[str, str]:
    """A conversation with a complete reply and one that was cut by its length, and a comparison of both."""
    async with HttpChat(url) as chat:
        conversation = await chat.create_conversation(title="Trip")
        sent = await chat.send_message(conversation.id, None, user("What is 2 + 3?"), parameters={"temperature": 0})
        await read_entries(chat, sent.reply.id)
        cut = await chat.start_reply(conversation.id, sent.message.id, parameters={"max_tokens": 3})
        await read_entries(chat, cut.id)
        columns = [ComparedReply(one.id, one.id, "sprout", {}) for one in (sent.reply, cut)]
        comparison = store.comparisons.create(conversation.id, sent.message.id, columns)
        digest = (await chat.put_blob(media_files.picture("GIF"))).digest
    ids = {"CONVERSATION": conversation.id, "MESSAGE": sent.message.id, "TURN": sent.reply.id, "STOPPED": cut.id}
    ids["COMPARISON"] = comparison.id
    ids["SHARE"] = store.shares.create(conversation.id, sent.reply.id, 60)[0].id
    return {"URL": url, "TOKEN": TOKEN, **ids, "DIGEST": digest}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A separate server: the lines load a model and leave turns running."""
    with LiveServer(tmp_path_factory.mktemp("documented"), ServerSettings(share=True)) as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="!!! NOT TESTED: curl is not installed")
async def test_every_line_works(live: LiveServer, tmp_path: Path) -> None:
    names = await prepare(live.url, live.service.store)
    assert len(lines()) > 35
    for line in lines():
        done = subprocess.run(
            ["sh", "-c", line], env={**os.environ, **names}, cwd=tmp_path, capture_output=True, timeout=60
        )
        assert done.returncode == 0, f"{line}\n{done.stdout.decode()}{done.stderr.decode()}"


async def test_every_route_is_documented(live: LiveServer) -> None:
    text = DOCUMENT.read_text()
    for path in live.server.routes.openapi()["paths"]:
        if path.startswith("/api/") and path != "/api/session":
            pattern = re.escape(path).replace(r"\{id\}", r"\$\w+").replace(r"\{digest\}", r"\$\w+")
            assert re.search(rf"{pattern}(?![\w/])", text), path
