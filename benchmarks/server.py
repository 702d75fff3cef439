"""The CPU cost of the server, its behaviour under many streams, and the time to free the slot of a lost client.

    python -m benchmarks.server streams --count 64 --seconds 60     # against a `palaver serve` of its own
    python -m benchmarks.server cost                                # CPU time for each streamed token
    python -m benchmarks.server vanish --times 200                  # from a closed connection to a free slot
    python -m benchmarks.server profile                             # where the server's time goes, by function

`streams` and `cost` read the CPU time and the memory of the server's own process, in which no engine runs.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
CHAT = "/v1/chat/completions"


@dataclass
class ServerProcess:
    """A `palaver serve` in a process of its own."""

    url: str
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the server's process; the engine runs in another."""
        spent = psutil.Process(self.pid).cpu_times()
        return spent.user + spent.system

    @property
    def memory_mb(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 2**20


@contextmanager
def server_process(*options: str) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--data", data, *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        log = Path(data) / "log.txt"
        with log.open("w") as errors, subprocess.Popen(command, stderr=errors, env=environment) as process:
            try:
                yield ServerProcess(_ready(log), process.pid)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def _ready(log: Path) -> str:
    """The URL of the server, once it is ready."""
    while not (found := re.search(r"http://\S+", log.read_text())):
        time.sleep(0.1)
    while httpx.get(f"{found[0]}/health", timeout=30).status_code != 200:
        time.sleep(0.2)
    return found[0]


@dataclass
class StreamTotals:
    """The results of all streams."""

    replies: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def question(number: int) -> tuple[str, str]:
    """A question of this stream alone, and what its answer must contain."""
    first, second = 100 + 7 * number, 205 + 3 * number
    return f"What is {first} + {second}?", str(first + second)


@dataclass
class RecordedReply:
    """The raw bytes of one reply and their times. They are parsed after the measurement."""

    number: int
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


async def stream(host: str, port: int, number: int, until: float, recorded: list[RecordedReply]) -> None:
    """Sends requests over a bare socket: a client that parses would take CPU time from the server."""
    fields = {"messages": [{"role": "user", "content": question(number)[0]}], "temperature": 0, "stream": True}
    body = json.dumps({**fields, "max_tokens": 200}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    while time.monotonic() < until:
        reply = RecordedReply(number)
        recorded.append(reply)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head.encode() + b"\r\n" + body)
            while data := await reader.read(65536):
                reply.pieces.append((time.monotonic(), data))
        finally:
            writer.close()


async def run_streams(url: str, count: int, seconds: float) -> StreamTotals:
    parts = urlsplit(url)
    recorded: list[RecordedReply] = []
    until = time.monotonic() + seconds
    port = parts.port or 80
    await asyncio.gather(*(stream(parts.hostname or "", port, number, until, recorded) for number in range(count)))
    totals = StreamTotals()
    for reply in recorded:
        add_reply(reply, totals)
    return totals


def add_reply(reply: RecordedReply, totals: StreamTotals) -> None:
    """Parses a recorded reply. The time of a token is that of the last byte of its event.

    Markers between thinking and answer have no event, so the time between those two is no gap.
    """
    answer, last, tokens, rest, thinking = "", 0.0, 0, b"", False
    if not reply.pieces or b" 200 " not in reply.pieces[0][1][:16]:
        totals.wrong.append(f"{reply.number}: {reply.pieces[:1]}")
        return
    for at, data in reply.pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                totals.wrong.append(f"{reply.number}: {line!r}")
                return
            delta = event["choices"][0]["delta"]
            answer += delta.get("content") or ""
            if delta.get("content") or delta.get("reasoning_content"):
                thought = bool(delta.get("reasoning_content"))
                if last and thought == thinking:
                    totals.gaps.append(at - last)
                last, tokens, thinking = at, tokens + 1, thought
    totals.replies += 1
    totals.tokens += tokens
    expected = question(reply.number)[1]
    if expected not in answer:
        totals.wrong.append(f"{reply.number}: {answer!r} without {expected}")


def streams(options: argparse.Namespace) -> None:
    with server_process() as server:
        asyncio.run(run_streams(server.url, options.count, 5))  # everything is warm
        before, cpu = server.memory_mb, server.cpu_seconds
        totals = asyncio.run(run_streams(server.url, options.count, options.seconds))
        spent, after = server.cpu_seconds - cpu, server.memory_mb
    gaps = sorted(totals.gaps)
    middle, late = statistics.median(gaps), gaps[int(len(gaps) * 0.99)]
    print(f"{options.count} streams for {options.seconds:g} s: {totals.replies} replies, {totals.tokens} tokens")
    print(f"wrong, mixed up or failed: {len(totals.wrong)}")
    print(f"between tokens: median {middle * 1e3:.1f} ms, p99 {late * 1e3:.1f} ms ({late / middle:.2f} times)")
    print(f"memory of the server: {before:.0f} MB, then {after:.0f} MB")
    print(f"CPU of the server: {spent / totals.tokens * 1e6:.0f} us a streamed token")
    for one in totals.wrong[:5]:
        print(" ", one)


async def long_replies(url: str, count: int, tokens: int) -> int:
    """Returns the number of tokens. The replies are long, so that the fixed cost of a request does not count."""
    received = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal received
        fields = {"messages": [{"role": "user", "content": question(number)[0]}], "temperature": 0, "stream": True}
        body = {**fields, "min_tokens": tokens, "max_tokens": tokens, "stream_options": {"include_usage": True}}
        async with client.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if '"completion_tokens":' in line:
                    received += json.loads(line[6:])["usage"]["completion_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(one(client, number) for number in range(count)))
    return received


def cost(options: argparse.Namespace) -> None:
    with server_process() as server:
        asyncio.run(long_replies(server.url, options.count, 50))
        cpu = server.cpu_seconds
        tokens = asyncio.run(long_replies(server.url, options.count, options.tokens))
        spent = server.cpu_seconds - cpu
    print(f"{options.count} streams: {tokens} tokens, {spent / tokens * 1e6:.0f} us of the server's CPU a token")


def vanish(options: argparse.Namespace) -> None:
    """Runs in this process, to read the statistics of the engine."""
    sys.path.insert(0, str(ROOT))
    from tests.server.live_server import LiveServer

    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "min_tokens": 6000}
    ).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    times = []
    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder)) as live:
        engine: Any = live.service.models.engine()
        for number in range(options.times):
            with socket.create_connection(("127.0.0.1", live.port)) as connection:
                connection.sendall(head.encode() + b"\r\n" + body)
                while not engine.statistics.running:
                    time.sleep(0.001)
                time.sleep((number % 10) * 0.003)
            closed = time.monotonic()
            while engine.statistics.running:
                time.sleep(0.0002)
            times.append(time.monotonic() - closed)
    times.sort()
    late = times[int(len(times) * 0.99)]
    middle = statistics.median(times)
    print(f"{len(times)} clients vanished: slot free after {middle * 1e3:.1f} ms, p99 {late * 1e3:.1f} ms")


def profile(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.server.live_server import LiveServer

    with tempfile.TemporaryDirectory() as folder, LiveServer(Path(folder)) as live:
        asyncio.run(run_streams(live.url, options.count, 3))
        profiler = cProfile.Profile()

        async def switch(on: bool) -> None:
            if on:
                profiler.enable()
            else:
                profiler.disable()

        live.run_in_loop(lambda: switch(True))
        totals = asyncio.run(run_streams(live.url, options.count, options.seconds))
        live.run_in_loop(lambda: switch(False))
    print(f"{totals.tokens} tokens")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(options.lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run, count, seconds in (
        ("streams", streams, 64, 60.0),
        ("profile", profile, 8, 10.0),
    ):
        one = commands.add_parser(name)
        one.add_argument("--count", type=int, default=count)
        one.add_argument("--seconds", type=float, default=seconds)
        one.add_argument("--lines", type=int, default=30)
        one.set_defaults(run=run)
    one = commands.add_parser("cost")
    one.add_argument("--count", type=int, default=16)
    one.add_argument("--tokens", type=int, default=1000)
    one.set_defaults(run=cost)
    one = commands.add_parser("vanish")
    one.add_argument("--times", type=int, default=200)
    one.set_defaults(run=vanish)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
