"""`kill -9` of the server during responses: nothing is lost, and sequence numbers keep their meaning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.responses.test_serving import RESPONSES, SUM, retrieve, wait_ended

ROOT = Path(__file__).parents[3]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server in its own process, once its model is loaded."""
    command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--data", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[3]
            with httpx.Client(base_url=url, timeout=120) as http:
                http.get("/api/model/ready?wait=60")
                yield process, http
        finally:
            process.send_signal(signal.SIGKILL)
            process.stderr.close()


def parse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: "))


@pytest.mark.slow
def test_killed_in_the_midst_of_a_stream(tmp_path: Path) -> None:
    body = {"input": SUM, "seed": 3, "background": True, "min_tokens": 100, "max_output_tokens": 120}
    received: list[dict[str, Any]] = []
    with serving(tmp_path) as (process, http):
        other = http.post(RESPONSES, json=body).json()
        with http.stream("POST", RESPONSES, json={**body, "stream": True}) as answer:
            for event in parse_events(answer.iter_lines()):
                received.append(event)
                if len(received) == 25:
                    process.kill()
                    break
    response = received[0]["response"]
    with serving(tmp_path) as (_, http):
        after = received[-1]["sequence_number"]
        with http.stream("GET", f"{RESPONSES}/{response['id']}?stream=true&starting_after={after}") as answer:
            rest = list(parse_events(answer.iter_lines()))
        with http.stream("GET", f"{RESPONSES}/{response['id']}?stream=true") as answer:
            whole = list(parse_events(answer.iter_lines()))
        assert [*received, *rest] == whole
        assert whole[-1]["type"] in ("response.completed", "response.incomplete")
        assert retrieve(http, response) == whole[-1]["response"]
        ended = wait_ended(http, retrieve(http, other))
        said = [item["content"] for item in ended["output"] if item["type"] == "reasoning"]
        assert said == [item["content"] for item in whole[-1]["response"]["output"] if item["type"] == "reasoning"]
