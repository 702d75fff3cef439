"""Whether a version is slower than an earlier one: both measured in one run, in turns.

    git worktree add --detach ../earlier COMMIT
    python benchmarks/before_after.py --old ../earlier --new . [--rounds 9] [--quick]

Each round measures the old version and the new one, in alternating order; the ratio of a round is new / old, so that
other load on the machine affects both alike. CPU times are of the server's own process; the engine runs in another one,
except in the measurement with steps that cost nothing, whose scripted engine runs in the server's process.

| measurement | what |
| --- | --- |
| server | CPU time of `palaver serve` for each streamed token, embedded model, `/v1/chat/completions` |
| server, stored | the same for replies that are kept in a conversation |
| server, free steps | the same with a scripted engine |
| server, free steps, stored | both |
| steps ... | seconds for each step of the torch engine, for 1 and for 8 replies at once, library or compiled code |
| help | seconds of `palaver --help` |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

STREAMS = 8
TICKS = os.sysconf("SC_CLK_TCK")
BATCHES = (1, 8)
PROMPT = 64
WORDS = 600
"""The words of a scripted reply, about 5 tokens each: CPU times are counted in hundredths of a second."""
STORED_TOKENS = 400
"""The tokens of a scripted reply that is stored. Each is committed."""


# the parent: two versions, measured in turns


@dataclass
class Child:
    """A process of one version: a server, or a worker that measures whenever it gets a line."""

    process: subprocess.Popen[str]
    url: str = ""

    @property
    def cpu_seconds(self) -> float:
        """User and system time of this process alone."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def read_line(self) -> str:
        return _line(self.process.stdout)

    def measure(self) -> dict[str, float]:
        assert self.process.stdin is not None
        print("measure", file=self.process.stdin, flush=True)
        found: dict[str, float] = json.loads(self.read_line())
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    assert line, "the process has ended"
    return line


@dataclass
class Version:
    """One checkout and its processes."""

    code: Path
    stack: ExitStack
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, command: Sequence[str], **pipes: Any) -> Child:
        environment = {**os.environ, "PYTHONPATH": f"{self.code / 'src'}{os.pathsep}{self.code}"}
        process = subprocess.Popen(command, env=environment, text=True, cwd=self.code, **pipes)
        child = Child(process)
        self.stack.callback(child.end)
        return child

    def worker(self, *arguments: str) -> Child:
        """A process that runs `run_worker` with the code of this version."""
        key = " ".join(arguments)
        if key not in self.children:
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", *arguments]
            self.children[key] = self.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.children[key]

    def server(self) -> Child:
        """A `palaver serve` with the embedded model."""
        if "serve" not in self.children:
            data = self.stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, "-m", "palaver", "serve", "--port", "0", "--data", data, "--compile"]
            log = self.stack.enter_context((Path(data) / "log.txt").open("w+"))
            child = self.start(command, stderr=log)
            while not (found := re.search(r"http://[^\s/]+", Path(log.name).read_text())):
                assert child.process.poll() is None, "the server did not start"
                time.sleep(0.1)
            child.url = found[0]
            self.children["serve"] = child
            asyncio.run(_wait_until_ready(child.url))
        return self.children["serve"]

    def scripted_server(self) -> Child:
        child = self.worker("scripted")
        child.url = child.url or child.read_line().strip()
        return child


async def _wait_until_ready(url: str) -> None:
    while b"200 OK" not in (await request(url, b"GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"))[:20]:
        await asyncio.sleep(0.2)


async def request(url: str, data: bytes) -> bytes:
    """The bytes of the answer, over a bare socket: a client that parses would take CPU time from the server."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(data)
        return await reader.read(-1)
    finally:
        writer.close()


async def stream_tokens(url: str, count: int, fields: Mapping[str, Any]) -> int:
    """Streams replies at once. Returns the number of their tokens."""

    async def one(number: int) -> int:
        content = f"What is {100 + number} + {205 + number}?"
        asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "stream": True, **fields}
        body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        answer = await request(url, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = re.findall(rb'"completion_tokens": ?(\d+)', answer)
        assert found, answer[-500:]
        return int(found[-1])

    return sum(await asyncio.gather(*(one(number) for number in range(count))))


def server_cost(child: Child, fields: Mapping[str, Any]) -> float:
    """CPU seconds for each streamed token."""
    before = child.cpu_seconds
    tokens = asyncio.run(stream_tokens(child.url, STREAMS, fields))
    return (child.cpu_seconds - before) / tokens


def help_time(version: Version) -> float:
    environment = {**os.environ, "PYTHONPATH": str(version.code / "src")}
    began = time.perf_counter()
    command = [sys.executable, "-m", "palaver", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began


def measurements(tokens: int) -> dict[str, Callable[[Version], dict[str, float]]]:
    """Each gives seconds by name."""
    long = {"min_tokens": tokens, "max_tokens": tokens}
    stored = {"metadata": {"conversation": "new"}}
    return {
        "server": lambda version: {
            "server": server_cost(version.server(), long),
            "server, stored": server_cost(version.server(), {**long, **stored}),
        },
        "free": lambda version: {
            "server, free steps": server_cost(version.scripted_server(), {}),
            "server, free steps, stored": server_cost(
                version.scripted_server(), {**stored, "max_tokens": STORED_TOKENS}
            ),
        },
        "steps": lambda version: version.worker("steps", "library", str(tokens)).measure(),
        "compiled": lambda version: version.worker("steps", "compiled", str(tokens)).measure(),
        "help": lambda version: {"help": help_time(version)},
    }


def run(options: argparse.Namespace) -> None:
    measures = measurements(options.tokens)
    found: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        old, new = (Version(path.resolve(), stack) for path in (options.old, options.new))
        for name in options.only or measures:
            measures[name](old), measures[name](new)  # everything is warm
            for round in range(options.rounds):
                order = (old, new) if round % 2 == 0 else (new, old)
                seconds = {id(version): measures[name](version) for version in order}
                for what, before in seconds[id(old)].items():
                    found.setdefault(what, []).append((before, seconds[id(new)][what]))
    print(f"{'median of ' + str(options.rounds) + ' rounds':32} {'old':>12} {'new':>12} {'new / old':>10}  range")
    for what, pairs in found.items():
        ratios = sorted(after / before for before, after in pairs)
        before, after = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        print(
            f"{what:32} {before * 1e6:9.1f} us {after * 1e6:9.1f} us {statistics.median(ratios):10.3f}"
            f"  {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


# a worker: runs with the code of one version


def first_of(*places: tuple[str, str]) -> Any:
    """The first that exists of these names of modules, each with a name in it: versions call things differently."""
    for module, name in places:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {places}")


async def serve_scripted() -> None:
    """A server over the scripted engine of the tests. Prints its URL and runs until it is terminated."""
    run_service = first_of(("tests.chat.scripted_service", "run_service"), ("tests.chat.making", "serving"))
    reply = first_of(("tests.chat.scripted_service", "reply"), ("tests.chat.making", "reply"))
    served, open_store = first_of(("tests.client.live", "served")), first_of(("palaver.store", "open_store"))
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        script = reply("short", "word " * WORDS)
        async with run_service(store, [script], context=1 << 20) as stage, served(stage.service) as url:
            await stage.service.models.ready()
            print(url, flush=True)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
            await ended.wait()


async def measure_steps(compiled: bool, tokens: int) -> None:
    """Answers each line of stdin with the seconds for each step of the engine."""
    Options = first_of(("palaver.engines.torch", "EngineOptions"), ("palaver.engines.torch", "Options"))
    load = first_of(("palaver.engines.torch", "load"))
    folder = Path(import_module("palaver.models").__path__[0]) / "sprout"
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = [str(number).encode() for number in range(size)]
    engine = load(folder, vocabulary=vocabulary, options=Options(threads=1, compiled=compiled))
    for _ in sys.stdin:
        kind = "compiled" if compiled else "library"
        found = {f"steps {kind}, batch {batch}": await step_seconds(engine, batch, tokens) for batch in BATCHES}
        print(json.dumps(found), flush=True)
    await engine.close()


async def step_seconds(engine: Any, batch: int, tokens: int) -> float:
    generation, sampling = import_module("palaver.generation"), import_module("palaver.sampling")
    how = sampling.Sampling(temperature=0, min_tokens=tokens, max_tokens=tokens)

    async def one(number: int) -> tuple[float, float]:
        times = []
        ids = tuple(3 + (7 * number + place) % 1000 for place in range(PROMPT))
        async with engine.generate(generation.Prompt(ids), how) as outputs:
            async for output in outputs:
                if isinstance(output, generation.Step):
                    times.append(time.perf_counter())
        return times[0], times[-1]

    spans = await asyncio.gather(*(one(number) for number in range(batch)))
    return (max(last for _, last in spans) - min(first for first, _ in spans)) / (tokens - 1)


def run_worker(kind: str, *arguments: str) -> None:
    if kind == "scripted":
        asyncio.run(serve_scripted())
    else:
        asyncio.run(measure_steps(arguments[0] == "compiled", int(arguments[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=500, help="of each reply")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 100 tokens")
    parser.add_argument("--only", nargs="+", choices=measurements(0))
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(*options.worker)
        return
    if options.old is None:
        parser.error("--old is needed")
    if options.quick:
        options.rounds, options.tokens = 3, 100
    run(options)


if __name__ == "__main__":
    main()
