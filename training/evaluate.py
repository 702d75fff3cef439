"""Measures the shipped model on fresh cases in held-out phrasings: `python3 -m training.evaluate`.

Prints a table, writes the figures as JSON, and puts them into the model card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training import card
from training.bars import BARS, Bar, cases
from training.checks import read, right
from training.conversations import Sample
from training.generation import Sampling, Writer, writer
from training.rendering import render
from training.tokenizer import SPROUT

GREEDY = Sampling()
DEFAULT = Sampling(0.6, 20, 0.95)


@dataclass(frozen=True, slots=True)
class Case:
    bar: str
    sample: Sample
    prompt: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    reply: str
    right: bool
    well_formed: bool
    ended: bool


def drawn(bars: tuple[Bar, ...], count: int, seed: int) -> list[Case]:
    return [Case(bar.name, sample, *render(sample)) for bar in bars for sample in cases(bar, count, seed)]


def outcomes(model: Writer, asked: list[Case], sampling: Sampling, batch: int) -> list[Outcome]:
    limits = [_limit(case) for case in asked]
    replies = model.replies([case.prompt for case in asked], limits, sampling, batch)
    return [_judged(case, reply) for case, reply in zip(asked, replies, strict=True)]


def _limit(case: Case) -> int:
    """Room for twice the wanted reply, in steps so that batches are alike."""
    return next(size for size in (256, 512, 1024, 2048, 4096) if size >= min(4096, len(case.wanted)))


def _judged(case: Case, reply: str) -> Outcome:
    found = read(reply, case.sample.thinks)
    assert case.sample.expect is not None
    return Outcome(case, reply, right(found, case.sample.expect), found.well_formed, found.ended)


def figures(bars: tuple[Bar, ...], found: list[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for bar in bars:
        mine = [o for o in found if o.case.bar == bar.name]
        rows.append({"bar": bar.name, "right": sum(o.right for o in mine), "of": len(mine), "wanted": bar.wanted})
    return rows


def forms(label: str, found: list[Outcome]) -> list[dict[str, Any]]:
    return [
        {
            "bar": f"thinking well-formed, {label}",
            "right": sum(o.well_formed for o in found),
            "of": len(found),
            "wanted": 0.995,
        },
        {
            "bar": f"ended by its end token, {label}",
            "right": sum(o.ended for o in found),
            "of": len(found),
            "wanted": 0.995,
        },
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        share = row["right"] / max(1, row["of"])
        mark = "" if row["wanted"] is None else "  ok" if share >= row["wanted"] else "  MISSED"
        wanted = "" if row["wanted"] is None else f"{row['wanted']:.1%}"
        lines.append(f"{row['bar']:<48}{row['right']:>6}/{row['of']:<6}{share:>8.2%} {wanted:>7}{mark}")
    return "\n".join(lines)


def write_failures(found: list[Outcome], path: Path) -> None:
    with path.open("w") as file:
        for o in found:
            if not (o.right and o.ended):
                value = o.case.sample.expect.value if o.case.sample.expect else None
                entry = {
                    "bar": o.case.bar,
                    "expect": value,
                    "prompt": o.case.prompt[-1500:],
                    "wanted": o.case.wanted,
                    "reply": o.reply,
                }
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def write(path: Path, given: argparse.Namespace, seconds: float, rows: list[dict[str, Any]]) -> None:
    found = {"seed": given.seed, "cases": given.cases, "seconds": round(seconds), "figures": rows}
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SPROUT)
    parser.add_argument("--cases", type=int, default=1000, help="cases of each bar")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch", type=int, default=0, help="replies written at once; 0 chooses by device")
    parser.add_argument("--bar", default="", help="only bars whose name contains this")
    parser.add_argument("--limit", type=int, default=0, help="stop drawing after so many cases in all")
    parser.add_argument("--every", type=int, default=4, help="repeat every n-th case with default sampling; 0 for none")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    parser.add_argument("--failures", type=Path, default=None, help="where to write every case that went wrong")
    parser.add_argument("--card", action="store_true", help="put the figures of --json into the model card and end")
    return parser.parse_args()


def main() -> int:
    began, given = time.monotonic(), arguments()
    path = given.json or given.model / "evaluation.json"
    if given.card:
        card.fill(given.model / "README.md", json.loads(path.read_text()))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = writer(given.model, device), given.batch or (1024 if device.type == "cuda" else 64)
    bars = tuple(bar for bar in BARS if given.bar in bar.name)
    asked = drawn(bars, given.cases, given.seed)[: given.limit or None]
    greedy = outcomes(model, asked, GREEDY, batch)
    rows = figures(bars, greedy) + forms("greedy", greedy)
    write(path, given, time.monotonic() - began, rows)
    if given.failures:
        write_failures(greedy, given.failures)
    print(table(rows), flush=True)
    if given.every:
        torch.manual_seed(given.seed)
        sampled = outcomes(model, asked[:: given.every], DEFAULT, batch)
        more = forms("default sampling", sampled)
        more += [{**row, "bar": row["bar"] + ", default sampling", "wanted": None} for row in figures(bars, sampled)]
        write(path, given, time.monotonic() - began, rows + more)
        print(table(more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
