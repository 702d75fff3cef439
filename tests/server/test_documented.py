"""Every curl line of the page about the API does what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.chat_client import post
from tests.server.live_server import TOKEN, LiveServer

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
        assert path.replace("{name}", "sprout").replace("{id}", "$RESPONSE") in shown, path


def response(live: LiveServer) -> str:
    """The id of a response, one for each line: some of them delete it."""
    answer = post(f"{live.url}/v1/responses", json={"input": "Hello", "max_output_tokens": 8})
    id: str = answer.json()["id"]
    return id


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_line_runs(live: LiveServer, command: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not here: the page's lines were NOT tried")
    if "$RESPONSE" in command:
        command = command.replace("$RESPONSE", response(live))
    told = command.replace("$URL", live.url).replace("$TOKEN", TOKEN) + r" -w '\n%{http_code}'"
    ran = subprocess.run(["bash", "-c", told], capture_output=True, text=True, errors="replace", check=True)
    body, _, status = ran.stdout.rpartition("\n")
    assert status == "200", body
    assert re.search(r"\S", body)
