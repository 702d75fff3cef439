"""Conversations as people have them, beside other servers of the same model: they begin at random, with messages and
replies of very different lengths, and go on after a pause. The tokens are drawn with the settings of a stored turn.

    python -m benchmarks.workload [--only palaver llama.cpp gguf] [--rates 0.5 1 2] [--seconds 60] [--plot FILE.svg]
    python -m benchmarks.workload --url NAME=http://127.0.0.1:8080 --url OTHER=http://127.0.0.1:8081 --rates 25

Every server gets the same conversations at the same times, one server after the other for each rate. Palaver stores
its turns with five alternatives of each token, as the page does; the others store nothing. Of each run: the tokens a
second from the first request to the last token, the seconds to the first token and the gaps between tokens at the 50th
and 99th percentile. The share is that of the tokens a second that the same server has with as many streams, all begun
at once, as were open on average.

The model is the embedded one with the end of a turn made unlikely (`benchmarks/peers.py`), so the workload decides how
long replies are. `--url` is any server with /v1/chat/completions that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import GGUF, PALAVER, STARTS, Answer, HttpPeer, pause, prepare, resume

SETTINGS: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""Of a stored turn. The seed is that of the turn."""
MOST_STEADY = 32
"""The most streams that the steady pace is measured with."""
WORDS = ("river", "number", "garden", "yellow", "seven", "letter", "morning", "basket", "window", "simple", "paper")


@dataclass(frozen=True)
class Turn:
    message: str
    tokens: int
    pause: float
    """Seconds between the reply before and this message."""
    seed: int


@dataclass(frozen=True)
class Conversation:
    at: float
    turns: tuple[Turn, ...]


@dataclass
class Run:
    """One server at one rate."""

    peer: str
    rate: float
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    steady: float = 0.0

    @property
    def pace(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def streams(self) -> float:
        """The mean number of open streams."""
        return sum(answer.seconds for answer in self.answers) / self.seconds

    @property
    def firsts(self) -> list[float]:
        return [answer.first for answer in self.answers]

    @property
    def gaps(self) -> list[float]:
        return [b - a for answer in self.answers for a, b in zip(answer.times, answer.times[1:], strict=False)]


def conversations(rate: float, seconds: float, seed: int) -> list[Conversation]:
    """Conversations that begin within that time, `rate` a second."""
    dice = random.Random(seed)
    found, at = [], dice.expovariate(rate)
    while at < seconds:
        turns = []
        for number in range(min(8, 1 + int(dice.expovariate(0.6)))):
            words = round(min(600, dice.lognormvariate(3.0, 0.8)))
            if dice.random() < 0.05:  # somebody pastes a document
                words = round(min(1200, dice.lognormvariate(6.3, 0.4)))
            message = " ".join(dice.choices(WORDS, k=words))
            tokens = round(min(768, max(8, dice.lognormvariate(4.3, 0.9))))
            pause = min(20.0, dice.lognormvariate(0.5, 0.7)) if number else 0.0
            turns.append(Turn(f"{message}?", tokens, pause, dice.randrange(1 << 31)))
        found.append(Conversation(at, tuple(turns)))
        at += dice.expovariate(rate)
    return found


async def converse(peer: HttpPeer, conversation: Conversation, run: Run) -> None:
    stores = peer.name.startswith((PALAVER, GGUF))
    stored = "new"
    messages: list[dict[str, str]] = []
    for turn in conversation.turns:
        await asyncio.sleep(turn.pause)
        messages.append({"role": "user", "content": turn.message})
        fields = SETTINGS | {"seed": turn.seed}
        if stores:
            fields |= {"metadata": {"conversation": stored}}
        try:
            answer = await peer.ask(messages, turn.tokens, **fields)
        except (RuntimeError, OSError, IndexError) as error:
            run.failures.append(f"{type(error).__name__}: {error}"[:200])
            return
        run.answers.append(answer)
        stored = answer.conversation or stored
        messages.append({"role": "assistant", "content": answer.text or "Well."})


async def play(peer: HttpPeer, rate: float, seconds: float, seed: int) -> Run:
    run = Run(peer.name, rate)
    began = time.perf_counter()

    async def begin(conversation: Conversation) -> None:
        await asyncio.sleep(max(0.0, began + conversation.at - time.perf_counter()))
        await converse(peer, conversation, run)

    await asyncio.gather(*map(begin, conversations(rate, seconds, seed)))
    run.seconds = time.perf_counter() - began
    run.steady = await steady_pace(peer, min(MOST_STEADY, max(1, round(run.streams))))
    return run


async def steady_pace(peer: HttpPeer, streams: int) -> float:
    """Tokens a second of so many streams that begin at once."""
    messages = [[{"role": "user", "content": f"{number} {' '.join(WORDS)}?"}] for number in range(streams)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(peer.ask(one, 128, **SETTINGS, seed=1) for one in messages))
    return sum(answer.tokens for answer in answers) / (time.perf_counter() - began)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(run: Run) -> list[str]:
    firsts, gaps = run.firsts, run.gaps
    return [
        f"{run.rate:g}",
        run.peer,
        f"{len(run.answers)}" + (f" ({len(run.failures)} failed)" if run.failures else ""),
        f"{run.streams:.1f}",
        f"{run.pace:.0f} ({run.pace / run.steady:.0%})",
        f"{statistics.median(firsts) * 1e3:.0f} / {percentile(firsts, 0.99) * 1e3:.0f} ms",
        f"{statistics.median(gaps) * 1e3:.1f} / {percentile(gaps, 0.99) * 1e3:.1f} ms",
    ]


HEAD = [
    "conversations/s",
    "server",
    "turns",
    "open streams",
    "tokens/s (share)",
    "first token 50 / 99%",
    "gap 50 / 99%",
]
COLOURS = ("#2a78d6", "#d6622a", "#3a9d5d", "#8a4fc4", "#b08a00")


def plot(runs: Sequence[Run]) -> str:
    """The 99th percentile of the first token by rate, a line a server, as SVG."""
    width, height, left, bottom = 640, 300, 60, 40
    rates = sorted({run.rate for run in runs})
    most = max(percentile(run.firsts, 0.99) for run in runs) * 1.1

    def point(run: Run) -> tuple[float, float]:
        step = (width - left - 150) / max(1, len(rates) - 1)
        y = height - bottom - percentile(run.firsts, 0.99) / most * (height - bottom - 20)
        return left + rates.index(run.rate) * step, y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<style>text { font-size: 12px }</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<path d="M{left} 20V{height - bottom}H{width - 140}" fill="none" stroke="#888"/>',
        f'<text x="{left}" y="14">seconds to the first token, 99th percentile</text>',
        f'<text x="{left}" y="{height - 6}">conversations a second</text>',
        f'<text x="{left - 8}" y="26" text-anchor="end">{most:.1f}</text>',
        f'<text x="{left - 8}" y="{height - bottom}" text-anchor="end">0</text>',
    ]
    for rate in rates:
        x = point(next(run for run in runs if run.rate == rate))[0]
        parts.append(f'<text x="{x:.0f}" y="{height - bottom + 16}" text-anchor="middle">{rate:g}</text>')
    for number, peer in enumerate(dict.fromkeys(run.peer for run in runs)):
        colour = COLOURS[number % len(COLOURS)]
        points = [point(run) for run in runs if run.peer == peer]
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{width - 132}" y="{30 + 18 * number}" fill="{colour}">{html.escape(peer)}</text>')
    return "\n".join([*parts, "</svg>", ""])


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(STARTS), default=["palaver", "llama.cpp"])
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0], help="conversations a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which conversations begin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gguf", choices=("f32", "f16", "q8_0", "q4_0"), default="f16")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    arguments = parser.parse_args()
    runs: list[Run] = []
    async with AsyncExitStack() as stack:
        peers = [HttpPeer(*one.split("=", 1)) for one in arguments.url]
        if not arguments.url:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prepare(folder)
            torch.set_num_threads(arguments.threads)
            for name in arguments.only:
                try:
                    started = await STARTS[name](stack, folder, arguments.gguf)
                except (ImportError, RuntimeError) as error:
                    print(f"left out: {name}: {error}", file=sys.stderr)
                    continue
                if isinstance(started, HttpPeer):
                    peers.append(started)
        pause(peers)
        for rate in arguments.rates:
            for peer in peers:
                resume([peer])
                runs.append(await play(peer, rate, arguments.seconds, arguments.seed))
                pause([peer])
                print(" | ".join(row(runs[-1])), file=sys.stderr)
    for cells in (HEAD, ["---"] * len(HEAD), *map(row, runs)):
        print(f"| {' | '.join(cells)} |")
    if arguments.plot:
        arguments.plot.write_text(plot(runs))
    failures = [f"{run.peer}: {failure}" for run in runs for failure in run.failures]
    print("\n".join(failures), file=sys.stderr)
    return 1 if any(failure.startswith(PALAVER) for failure in failures) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
