"""Every line that the documentation shows works as it stands, against a live server with the embedded model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaver.client import HttpChat
from palaver.messages import user
from tests.chat.making import entries
from tests.client.live import TOKEN
from tests.server.live import Live

DOCUMENT = Path(__file__).parents[3] / "docs" / "http-api.md"


def lines() -> list[str]:
    section = DOCUMENT.read_text().split("\n## Conversations\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


async def prepared(url: str) -> dict[str, str]:
    """A conversation with a whole reply and one that was cut for its length."""
    async with HttpChat(url) as chat:
        talk = await chat.create(title="Trip")
        said = await chat.say(talk.id, None, user("What is 2 + 3?"), parameters={"temperature": 0})
        await entries(chat, said.reply.id)
        cut = await chat.reply(talk.id, said.message.id, parameters={"max_tokens": 3})
        await entries(chat, cut.id)
        digest = await chat.put_blob(b"GIF89a")
    ids = {"CONVERSATION": talk.id, "MESSAGE": said.message.id, "TURN": said.reply.id, "STOPPED": cut.id}
    return {"URL": url, "TOKEN": TOKEN, **ids, "DIGEST": digest}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One of its own: the lines load a model and leave turns running."""
    with Live(tmp_path_factory.mktemp("documented")) as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="!!! NOT TESTED: curl is not installed")
async def test_every_line_works(live: Live) -> None:
    names = await prepared(live.url)
    assert len(lines()) > 35
    for line in lines():
        done = subprocess.run(["sh", "-c", line], env={**os.environ, **names}, capture_output=True, timeout=60)
        assert done.returncode == 0, f"{line}\n{done.stdout.decode()}{done.stderr.decode()}"


async def test_every_route_is_documented(live: Live) -> None:
    text = DOCUMENT.read_text()
    for path in live.server.routes.openapi()["paths"]:
        if path.startswith("/api/") and path != "/api/session":
            pattern = re.escape(path).replace(r"\{id\}", r"\$\w+").replace(r"\{digest\}", r"\$\w+")
            assert re.search(rf"{pattern}(?![\w/])", text), path
