"""Measures Sprout Diffusion on fresh cases in held-out phrasings.

`python3 -m training.diffusion.evaluate --model RUN`, where RUN has the weights of a training run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from training import bars as text_bars
from training import evaluate as text
from training.abilities import arithmetic, letters
from training.bars import Bar
from training.conversations import Exchange, conversation
from training.diffusion.generation import replies
from training.diffusion.network import NOISY, DiffusionNetwork, shape_of
from training.evaluate import Case, Outcome, judged
from training.network import TINY, Shape
from training.omni import weights
from training.phrasings import Draw
from training.tokenizer import SPROUT, load

FORM_WANTED = 0.98
LONGEST_PROMPT = 4000
"""Characters. Every step computes the whole text again, so longer cases are left out."""


def _sum(draw: Draw) -> Exchange:
    return arithmetic.sum_(draw, 2)


def _short_word(draw: Draw) -> Exchange:
    while True:
        found = letters.reverse(draw)
        if found.expect and len(found.expect.value) <= 6:
            return found


BARS = (
    Bar("sums of two digits", 0.90, lambda draw: conversation(_sum(draw))),
    Bar("reversal of words up to 6 letters", 0.85, lambda draw: conversation(_short_word(draw))),
    *(Bar(bar.name, 0.85, bar.draw) for bar in text_bars.BARS if bar.name == "system manners"),
)
OTHERS = tuple(Bar(bar.name, None, bar.draw) for bar in text_bars.BARS if bar.name != "system manners")


def drawn(count: int, others: int, seed: int) -> list[Case]:
    found = text.drawn(BARS, count, seed) + text.drawn(OTHERS, others, seed)
    return [case for case in found if len(case.prompt) <= LONGEST_PROMPT]


def measured(
    network: DiffusionNetwork, tokenizer: Tokenizer, cases: list[Case], steps: int, batch: int
) -> tuple[list[dict[str, Any]], list[Outcome]]:
    prompts, limits = [case.prompt for case in cases], [min(1024, max(128, len(case.wanted))) for case in cases]
    found = replies(network, tokenizer, prompts, limits, steps, batch)
    outcomes = [judged(case, reply) for case, reply in zip(cases, found, strict=True)]
    named = tuple(bar for bar in (*BARS, *OTHERS) if any(case.bar == bar.name for case in cases))
    return text.figures(named, outcomes, f"{steps} steps", FORM_WANTED), outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the --out of the training")
    parser.add_argument("--cases", type=int, default=250, help="cases of each bar that is wanted")
    parser.add_argument("--others", type=int, default=0, help="cases of each other bar of Sprout")
    parser.add_argument("--steps", type=int, nargs="+", default=[NOISY], help="steps of a block")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--failures", type=Path, default=None, help="where to write every case that went wrong")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = json.loads((given.model / "run.json").read_text())
    network = DiffusionNetwork(shape_of(TINY if about["tiny"] else Shape()))
    weights.load(given.model, network)
    network.to(device)
    cases, rows, parts = drawn(given.cases, given.others, given.seed), [], {}
    for steps in given.steps:
        began = time.monotonic()
        figures, parts[f"{steps} steps"] = measured(network, load(SPROUT), cases, steps, given.batch)
        print(text.table(figures) + f"\n{time.monotonic() - began:.0f} s", flush=True)
        rows += figures
    (given.model / "evaluation.json").write_text(json.dumps({"seed": given.seed, "figures": rows}, indent=1) + "\n")
    if given.failures:
        text.write_failures(parts, given.failures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
