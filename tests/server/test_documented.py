"""Every curl line of the page about the API does what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import media_files
from tests.server.chat_client import post
from tests.server.live_server import TOKEN, LiveServer
from tests.voice.tiny_models import make_whisper

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"
LINES = [
    line for line in PAGE.read_text(encoding="utf-8").partition("## Conversations")[0].splitlines() if "curl " in line
]
COMMANDS = [line for line in LINES if line.startswith("curl ")]


def test_the_page_has_a_line_for_every_route_of_this_side(live: LiveServer) -> None:
    shown = "\n".join(COMMANDS)
    for path in live.server.routes.openapi()["paths"]:
        if path.startswith("/api") or path == "/v1/model/unload":
            continue
        id = "$CONVERSATION" if path.startswith("/v1/conversations") else "$RESPONSE"
        assert path.replace("{name}", "sprout").replace("{id}", id).replace("{item_id}", "$ITEM") in shown, path


def response(live: LiveServer) -> str:
    """The id of a response, one for each line: some of them delete it."""
    answer = post(f"{live.url}/v1/responses", json={"input": "Hello", "max_output_tokens": 8})
    id: str = answer.json()["id"]
    return id


def conversation(live: LiveServer) -> tuple[str, str]:
    """The ids of a conversation and of one of its items."""
    items = [{"role": "user", "content": text} for text in ("Hello", "Are you there?")]
    made = post(f"{live.url}/v1/conversations", json={"items": items}).json()["id"]
    stored = httpx.get(f"{live.url}/v1/conversations/{made}/items").json()["data"]
    return made, stored[0]["id"]


@pytest.fixture(scope="module")
def whisper(live: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that transcribes. The server loads it once, for all lines with a recording."""
    yield make_whisper(tmp_path_factory.mktemp("whisper"))
    if live.service._transcriber is not None:
        live.run_in_loop(live.service._transcriber.close)
        live.service._transcriber = None


@pytest.fixture
def folder(request: pytest.FixtureRequest, live: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lines run. For those with a recording, there is one, and the server transcribes."""
    if "speech.wav" in request.node.callspec.params["command"]:
        (tmp_path / "speech.wav").write_bytes(media_files.sound())
        monkeypatch.setattr(live.service, "transcriber_name", str(request.getfixturevalue("whisper")))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_line_runs(live: LiveServer, command: str, folder: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not here: the page's lines were NOT tried")
    if "$RESPONSE" in command:
        command = command.replace("$RESPONSE", response(live))
    if "$CONVERSATION" in command:
        made, item = conversation(live)
        command = command.replace("$CONVERSATION", made).replace("$ITEM", item)
    told = command.replace("$URL", live.url).replace("$TOKEN", TOKEN) + r" -w '\n%{http_code}'"
    ran = subprocess.run(["bash", "-c", told], cwd=folder, capture_output=True, text=True, errors="replace", check=True)
    body, _, status = ran.stdout.rpartition("\n")
    if "/v1/fill" in command:  # `test_diffusion_model.py` runs it: this model writes token by token
        assert (status, "masks are for diffusion models" in body) == ("400", True), body
        return
    assert status == "200", body
    assert re.search(r"\S", body)
