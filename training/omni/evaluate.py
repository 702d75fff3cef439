"""Measures Sprout Omni on fresh cases in held-out phrasings: `python3 -m training.omni.evaluate --model FOLDER`.

FOLDER has the weights of a run, or the finished model. Text abilities shall reach nine tenths of Sprout's.
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
from training.checks import read, right
from training.conversations import Sample
from training.evaluate import table as table
from training.omni import bars, generation, tokens, weights
from training.omni.features import Medium
from training.omni.network import TINY, OmniNetwork, OmniShape
from training.rendering import render
from training.tokenizer import SPROUT

SHARE_OF_SPROUT = 0.9
Case = tuple[str, float | None, Sample, tuple[Medium, ...]]
Figure = dict[str, Any]


def drawn(count: int, text_count: int, seed: int, only: str = "") -> list[Case]:
    found: list[Case] = []
    for bar in bars.BARS:
        if only in bar.name and count:
            found += [(bar.name, bar.wanted, one.sample, one.media) for one in bars.cases(bar, count, seed)]
    of_sprout = sprout_shares()
    for text_bar in text_bars.BARS:
        name = f"text: {text_bar.name}"
        if only in name and text_count:
            wanted = SHARE_OF_SPROUT * of_sprout[text_bar.name]
            found += [(name, wanted, sample, ()) for sample in text_bars.cases(text_bar, text_count, seed)]
    return found


def sprout_shares() -> dict[str, float]:
    """The share of each bar that Sprout gets right, greedily."""
    figures = json.loads((SPROUT / "evaluation.json").read_text())["figures"]
    return {one["bar"]: one["right"] / one["of"] for one in figures if one["sampling"] == "greedy"}


def judged(network: OmniNetwork, tokenizer: Tokenizer, cases: list[Case], batch: int) -> list[tuple[bool, str]]:
    """Whether each reply is right, and the reply."""
    prompts = []
    for _, _, sample, media in cases:
        text, wanted = render(sample)
        limit = next(size for size in (128, 256, 512, 1024, 2048) if size >= min(2048, len(wanted)))
        prompts.append(generation.prompt(tokenizer, text, media, limit))
    found = []
    for (_, _, sample, _), reply in zip(cases, generation.replies(network, tokenizer, prompts, batch), strict=True):
        assert sample.expect is not None
        found.append((right(read(reply, sample.thinks), sample.expect), reply))
    return found


def figures_of(cases: list[Case], held: list[bool]) -> list[Figure]:
    """What was right of each bar, and of all text bars together."""
    rows: dict[str, Figure] = {}
    for (name, wanted, _, _), is_right in zip(cases, held, strict=True):
        row = rows.setdefault(name, {"bar": name, "sampling": "greedy", "right": 0, "of": 0, "wanted": wanted})
        row["right"] += is_right
        row["of"] += 1
    text = [row for row in rows.values() if row["bar"].startswith("text: ")]
    if text:
        wanted = sum(row["wanted"] * row["of"] for row in text) / sum(row["of"] for row in text)
        total = {name: sum(row[name] for row in text) for name in ("right", "of")}
        rows["all"] = {"bar": "text abilities together", "sampling": "greedy", **total, "wanted": wanted}
    return list(rows.values())


def measured(network: OmniNetwork, tokenizer: Tokenizer, count: int, seed: int, text_cases: int) -> list[Figure]:
    cases = drawn(count, text_cases, seed)
    device = network.language_model.norm.weight.device
    found = judged(network, tokenizer, cases, 1024 if device.type == "cuda" else 32)
    return figures_of(cases, [is_right for is_right, _ in found])


def load(folder: Path) -> OmniNetwork:
    if (folder / "run.json").exists():
        network = OmniNetwork(TINY if json.loads((folder / "run.json").read_text())["tiny"] else OmniShape())
        weights.load(folder, network)
    else:
        from training.omni import export  # training goes without transformers' Qwen2.5-Omni

        network = OmniNetwork(OmniShape())
        export.restore(network, folder)
    return network.eval()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200, help="cases of each bar with media")
    parser.add_argument("--text-cases", type=int, default=50, help="cases of each bar without")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--bar", default="", help="only bars whose name contains this")
    parser.add_argument("--batch", type=int, default=0, help="replies written at once; 0 chooses by device")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    parser.add_argument("--failures", type=Path, default=None, help="where to write every case that went wrong")
    return parser.parse_args()


def main() -> int:
    began, given = time.monotonic(), arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load(given.model).to(device)
    cases = drawn(given.cases, given.text_cases, given.seed, given.bar)
    found = judged(network, tokens.make(), cases, given.batch or (1024 if device.type == "cuda" else 32))
    figures = figures_of(cases, [is_right for is_right, _ in found])
    print(table(figures), flush=True)
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s")
    if given.json:
        shown = {"seed": given.seed, "cases": given.cases, "text_cases": given.text_cases, "figures": figures}
        given.json.write_text(json.dumps(shown, ensure_ascii=False, indent=1) + "\n")
    if given.failures:
        with given.failures.open("w") as file:
            for (name, _, sample, _), (is_right, reply) in zip(cases, found, strict=True):
                if not is_right:
                    prompt, wanted = render(sample)
                    line = {"bar": name, "prompt": prompt[-800:], "wanted": wanted, "reply": reply}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
