"""Trains Sprout Diffusion: `python3 -m training.diffusion.train --minutes 8 --out OUT`.

It starts from Sprout's weights. Workers write shards of conversations while the network trains on those already there.
The learning rate follows the clock, so that a run ends when its time does. A command that is out of time before the run
is finished saves its weights; started again with `--resume`, it goes on from them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from training import evaluate as text
from training.diffusion import evaluate
from training.diffusion.network import (
    NOISY,
    Batcher,
    DiffusionNetwork,
    Inputs,
    shape_of,
    start_from_sprout,
)
from training.network import BLOCK, TINY, Shape
from training.omni import weights
from training.shards import Plan
from training.tokenizer import SPROUT, load
from training.train import ROOT, Clock, Run, batches, workers

SAVE_EVERY = 120
ENDLESS = 10_000_000
"""Steps: the clock ends a run."""


@dataclass(frozen=True, slots=True)
class Trainer:
    network: DiffusionNetwork
    optimizer: AdamW
    batcher: Batcher

    @property
    def device(self) -> torch.device:
        return self.batcher.cos.device

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def loss(self, given: Inputs) -> Tensor:
        with self.precision():
            hidden = self.network(given.tokens, given.cos, given.sin, given.mask)
            return self.network.weighted_loss(hidden, given.labels, given.weights)

    def step(self, packed: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(self.batcher.inputs(packed.to(self.device, non_blocking=True)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def trainer(given: argparse.Namespace, device: torch.device) -> Trainer:
    torch.manual_seed(given.seed)
    shape = shape_of(TINY if given.tiny else Shape())
    network = DiffusionNetwork(shape)
    if not given.tiny:
        start_from_sprout(network)
    network.to(device)
    matrices = [p for p in network.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=given.peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    attention = given.attention or ("flex" if device.type == "cuda" else "dense")
    blocks = given.noisy * given.length // NOISY // 100 // (BLOCK // NOISY) * (BLOCK // NOISY)
    return Trainer(network, optimizer, Batcher.of(shape, given.length, blocks, attention, device))


def compiled(found: Trainer) -> None:
    for block in found.network.model.layers:
        block.compile(dynamic=False)
    found.network.weighted_loss = torch.compile(  # type: ignore[method-assign]
        found.network.weighted_loss, dynamic=False
    )


def checked(found: Trainer, packed: Tensor) -> None:
    """Stops a run whose block-sparse attention is not what the plain mask gives."""
    random = torch.random.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    given = found.batcher.inputs(packed.to(found.device))
    torch.random.set_rng_state(random[0])
    if random[1] is not None:
        torch.cuda.set_rng_state(random[1])
    plain = replace(found.batcher, attention="dense").inputs(packed.to(found.device))
    assert torch.equal(given.tokens, plain.tokens)
    assert isinstance(plain.mask, Tensor)
    with found.precision():
        sparse = found.network(given.tokens, given.cos, given.sin, given.mask)[:2].detach().float()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            dense = found.network(plain.tokens[:2], plain.cos[:2], plain.sin[:2], plain.mask[:2]).float()
    apart = float((sparse - dense).abs().mean() / dense.abs().mean())
    print(f"attention check: {found.batcher.attention} is {apart:.5f} away from the plain mask", flush=True)
    if not apart < 0.03:
        raise RuntimeError("the attention differs from the plain mask; train with --attention dense")


def restore(found: Trainer, given: argparse.Namespace, clock: Clock) -> str:
    """Fills network, optimizer and clock; says from where."""
    if (given.work / "state.pt").exists():
        about, source = weights.load_state(given.work / "state.pt", found.network, found.optimizer), "this machine"
    elif given.resume and (given.resume / "run.json").exists():
        about, source = weights.load(given.resume, found.network), str(given.resume)
    else:
        return "nothing" if given.tiny else "Sprout"
    clock.spent, clock.step = about["seconds"], about["step"]
    return f"{source}, step {clock.step}, {clock.spent:.0f} s of training"


def train(found: Trainer, given: argparse.Namespace, clock: Clock, until: float) -> bool:
    """Trains until the run or the time of this command is over; whether the run is finished."""
    plan = Plan(given.seed + 1000 * clock.step, given.length, given.work / f"shards-{clock.step}", SPROUT)
    run = Run(given.seed, ENDLESS, given.rows, plan)
    first, finished = clock.step, False
    with workers(run, given.workers, 0) as writers:
        rows = batches(run, 0, writers)
        packed = next(rows)
        if found.batcher.attention == "flex":
            checked(found, packed)
        found.step(packed, 0.0)
        clock.began = last = saved = time.monotonic()
        if given.last:
            clock.total = clock.spent + until - clock.began
        print(f"first step after {clock.began - given.began:.0f} s; {clock.total:.0f} s in all", flush=True)
        for packed in rows:
            rate = clock.rate(given.peak, given.peak / 100, clock.step - first)
            loss = found.step(packed, rate)
            clock.step += 1
            if clock.step % given.report == 0:
                per_second = given.report / (time.monotonic() - last)
                tokens = round(per_second * given.rows * given.length)
                clock.log(given.out, loss.item(), rate, per_second, clean_tokens_per_second=tokens)
                last = time.monotonic()
                if last - saved > SAVE_EVERY:
                    saved = last
                    weights.save(given.out, found.network, clock.state(finished=False, tiny=given.tiny))
            finished = clock.elapsed() >= clock.total or bool(given.steps and clock.step - first >= given.steps)
            if finished or time.monotonic() > until:
                break
    return finished


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--minutes", type=float, default=8.0, help="save and stop this command after this time")
    parser.add_argument("--total", type=float, default=8.0, help="minutes of training in all, over all commands")
    parser.add_argument("--last", action="store_true", help="end the run in this command: the time left is its rest")
    parser.add_argument("--steps", type=int, default=0, help="end the run after so many steps of this command")
    parser.add_argument("--rows", type=int, default=32, help="rows in a step")
    parser.add_argument("--length", type=int, default=4096, help="clean tokens in a row")
    parser.add_argument("--noisy", type=int, default=50, help="noisy tokens for 100 clean ones")
    parser.add_argument("--peak", type=float, default=1.2e-3, help="the highest learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--attention", choices=("flex", "dense"), default=None)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--out", type=Path, required=True, help="weights, log and figures")
    parser.add_argument("--resume", type=Path, default=None, help="the --out of the command before")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".cache" / "training" / "diffusion", help="shards and state"
    )
    parser.add_argument("--cases", type=int, default=250, help="cases of each wanted bar at the end; 0 for none")
    parser.add_argument("--others", type=int, default=40, help="cases of each other bar")
    parser.add_argument("--report", type=int, default=100, help="steps between two lines of the log")
    parser.add_argument("--tiny", action="store_true", help="a minuscule network, for a computer without accelerator")
    return parser.parse_args()


def measure(found: Trainer, given: argparse.Namespace) -> None:
    """The figures with 32 and 8 steps a block, and every case that went wrong."""
    rows, parts = [], {}
    cases = evaluate.drawn(given.cases, given.others, 7)
    for steps in (NOISY, NOISY // 4):
        with torch.compiler.set_stance("force_eager"):
            figures, parts[f"{steps} steps"] = evaluate.measured(found.network, load(SPROUT), cases, steps, 256)
        rows += figures
        print(text.table(figures), flush=True)
    about = {"seed": 7, "cases": given.cases, "figures": rows}
    (given.out / "evaluation.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n")
    text.write_failures(parts, given.out / "failures.jsonl")


def main() -> int:
    given = arguments()
    given.began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(given.total * 60)
    found = trainer(given, device)
    print(f"starts from {restore(found, given, clock)}", flush=True)
    if device.type == "cuda" and not given.eager:
        compiled(found)
    finished = train(found, given, clock, given.began + given.minutes * 60)
    about = clock.state(finished, given.tiny)
    weights.save(given.out, found.network, about)
    weights.save_state(given.work / "state.pt", found.network, found.optimizer, about)
    print(f"saved after {time.monotonic() - given.began:.0f} s; finished: {finished}", flush=True)
    if given.cases:
        measure(found, given)
    print(f"done after {time.monotonic() - given.began:.0f} s", flush=True)
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
