"""Measures the shipped model on fresh cases in held-out phrasings: `python3 -m training.evaluate`.

Every case is asked twice: greedily, and at the model's default sampling. Prints a table, writes the figures as JSON,
and puts them into the model card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from training import card
from training.bars import BARS, Bar, cases
from training.checks import read, right
from training.conversations import Sample
from training.generation import Sampling, Writer, defaults, writer
from training.rendering import render
from training.tokenizer import SPROUT

FORM_WANTED = 0.995


@dataclass(frozen=True, slots=True)
class Case:
    bar: str
    sample: Sample
    prompt: str
    """With the beginning of the reply, where a grammar writes it."""
    wanted: str
    begun: str = ""
    """The beginning of the reply that stands in the prompt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    reply: str
    right: bool
    well_formed: bool
    ended: bool


def drawn(bars: tuple[Bar, ...], count: int, seed: int) -> list[Case]:
    return [_case(bar.name, sample) for bar in bars for sample in cases(bar, count, seed)]


def _case(bar: str, sample: Sample) -> Case:
    prompt, wanted = render(sample)
    if not sample.pieces:
        return Case(bar, sample, prompt, wanted)
    forced = "".join(piece.text for piece in takewhile(lambda piece: not piece.learned, sample.pieces))
    begun = wanted[: wanted.rindex(sample.messages[-1].content)] + forced
    return Case(bar, sample, prompt + begun, wanted, begun)


def outcomes(model: Writer, asked: list[tuple[Case, Sampling]], batch: int) -> list[Outcome]:
    """What came of each case; greedy and drawn replies are written in the same batches."""
    cases, samplings = [case for case, _ in asked], [sampling for _, sampling in asked]
    replies = model.replies([case.prompt for case in cases], [_limit(case) for case in cases], samplings, batch)
    return [judged(case, reply) for case, reply in zip(cases, replies, strict=True)]


def _limit(case: Case) -> int:
    """Room for twice the wanted reply, in steps so that batches are alike."""
    return next(size for size in (256, 512, 1024, 2048, 4096) if size >= min(4096, len(case.wanted)))


def judged(case: Case, reply: str) -> Outcome:
    found = read(case.begun + reply, case.sample.thinks)
    assert case.sample.expect is not None
    return Outcome(case, reply, right(found, case.sample.expect), found.well_formed, found.ended)


def figures(
    bars: tuple[Bar, ...], found: list[Outcome], sampling: str, form_wanted: float = FORM_WANTED
) -> list[dict[str, Any]]:
    """What was right of each bar, and how many replies had the form of a reply."""
    rows = []
    for bar in bars:
        mine = [o.right for o in found if o.case.bar == bar.name]
        rows.append(_figure(bar.name, sampling, mine, bar.wanted))
    rows.append(_figure("thinking well-formed", sampling, [o.well_formed for o in found], form_wanted))
    rows.append(_figure("ended by its end token", sampling, [o.ended for o in found], form_wanted))
    return rows


def _figure(bar: str, sampling: str, held: list[bool], wanted: float | None) -> dict[str, Any]:
    return {"bar": bar, "sampling": sampling, "right": sum(held), "of": len(held), "wanted": wanted}


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        share = row["right"] / max(1, row["of"])
        mark = "" if row["wanted"] is None else "  ok" if share >= row["wanted"] else "  MISSED"
        wanted = "" if row["wanted"] is None else f"{row['wanted']:.1%}"
        named = f"{row['bar']:<36}{row['sampling']:<9}"
        lines.append(f"{named}{row['right']:>6}/{row['of']:<6}{share:>8.2%} {wanted:>7}{mark}")
    return "\n".join(lines)


def compared(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> tuple[str, bool]:
    """What each bar lost or gained against other weights on the same cases, and whether these are to be preferred.

    They are if no bar is missed that was met before, and none lost more than one case in a hundred.
    """
    old = {(row["bar"], row["sampling"]): row for row in before}
    lines, preferred = [], True
    for row in rows:
        then = old.get((row["bar"], row["sampling"]))
        if then is None or then["of"] != row["of"]:
            continue
        change, wanted = row["right"] - then["right"], row["wanted"] or 0.0
        newly_missed = row["right"] < wanted * row["of"] <= then["right"]
        bad = newly_missed or change < -0.01 * row["of"]
        preferred = preferred and not bad
        if change:
            named = f"{row['bar']:<36}{row['sampling']:<9}"
            lines.append(f"{named}{then['right']:>6} -> {row['right']:<6}of {row['of']:<6}{'  WORSE' if bad else ''}")
    return "\n".join([*lines, "preferred" if preferred else "not preferred: see WORSE"]), preferred


def write_failures(parts: dict[str, list[Outcome]], path: Path) -> None:
    wrong = [(name, o) for name, part in parts.items() for o in part if not (o.right and o.ended)]
    path.write_text("".join(json.dumps(_failure(name, o), ensure_ascii=False) + "\n" for name, o in wrong))


def _failure(sampling: str, outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "bar": case.bar,
        "sampling": sampling,
        "expect": case.sample.expect.value if case.sample.expect else None,
        "prompt": case.prompt[-1500:],
        "wanted": case.wanted,
        "reply": outcome.reply,
    }


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
    parser.add_argument("--every", type=int, default=1, help="repeat every n-th case with default sampling; 0 for none")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    parser.add_argument("--failures", type=Path, default=None, help="where to write every case that went wrong")
    parser.add_argument(
        "--against",
        type=Path,
        default=None,
        help="the figures of other weights on the same cases; status 4 if those are better",
    )
    parser.add_argument("--card", action="store_true", help="put the figures of --json into the model card and end")
    return parser.parse_args()


def main() -> int:
    began, given = time.monotonic(), arguments()
    path = given.json or given.model / "evaluation.json"
    if given.card:
        card.fill(given.model / "README.md", json.loads(path.read_text()))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = writer(given.model, device), given.batch or (2048 if device.type == "cuda" else 64)
    bars = tuple(bar for bar in BARS if given.bar in bar.name)
    asked = drawn(bars, given.cases, given.seed)[: given.limit or None]
    torch.manual_seed(given.seed)
    again, drawing = asked[:: given.every] if given.every else [], defaults(given.model)
    found = outcomes(model, [(case, Sampling()) for case in asked] + [(case, drawing) for case in again], batch)
    parts = {"greedy": found[: len(asked)], "default": found[len(asked) :]}
    rows = [row for name, part in parts.items() if part for row in figures(bars, part, name)]
    write(path, given, time.monotonic() - began, rows)
    print(table(rows), flush=True)
    if given.failures:
        write_failures(parts, given.failures)
    if given.against:
        text, preferred = compared(rows, json.loads(given.against.read_text())["figures"])
        print(text, flush=True)
        return 0 if preferred else 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
