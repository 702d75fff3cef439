"""The socket of `palaver serve` as a person starts it, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.server.chat_client import get
from tests.server.socket.client import SUM, connect_client

ROOT = Path(__file__).parents[3]


async def test_it_serves_sockets_and_ends_them_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--grace", "0", "--data", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().split()[3]
            while get(f"{url}/health").status_code != 200:
                assert process.poll() is None
            async with connect_client(url) as client, connect_client(url) as idle:
                assert "42" in (await client.request(messages=SUM, generation={"do_sample": False}))[-1]["text"]
                await client.send(messages=SUM, generation={"min_tokens": 6000, "max_new_tokens": 6000})
                assert (await client.receive())["type"] == "prefill_done"
                process.send_signal(signal.SIGTERM)
                assert "shutting down" in (await client.receive_turn())[-1]["error"]
                assert (await client.wait_closed())[0] == 1001
                assert (await idle.wait_closed())[0] == 1001
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert "Traceback" not in rest
    assert "SOCKET /ws/chat 101" in rest
