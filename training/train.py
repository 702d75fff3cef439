"""From nothing to weights: `python3 -m training.train`.

Workers write shards of conversations while the network trains on those already there. A run that is out of time saves
its state and goes on from there when started again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from training import checkpoints, export
from training.network import TINY, Mask, Network, Shape, rotations, unpack_rows
from training.shards import ROWS_PER_SHARD, STARTS, Plan
from training.tokenizer import SPROUT, made

ROOT = Path(__file__).parent.parent
STEPS, POLISH_STEPS = 9000, 4000
POLISH_PEAK = 8e-4
WARM_UP = 200


@dataclass(frozen=True, slots=True)
class Run:
    """A training run; the learning rate and the data at a step depend on nothing else."""

    seed: int
    steps: int
    rows: int
    plan: Plan
    peak: float = 2e-3
    floor: float = 2e-5
    warm_up: int = WARM_UP

    @property
    def shards(self) -> int:
        return -(-self.steps * self.rows // ROWS_PER_SHARD)

    def rate(self, step: int) -> float:
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(slots=True)
class Clock:
    """Seconds of training, over all commands of a run."""

    total: float
    spent: float = 0.0
    step: int = 0
    began: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    def rate(self, peak: float, floor: float, since_start: int) -> float:
        share = min(1.0, self.elapsed() / self.total)
        warm = min(1.0, (since_start + 1) / WARM_UP)
        return warm * (floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * share)))

    def state(self, finished: bool, tiny: bool) -> dict[str, Any]:
        """What is saved with the weights, to go on from in the next command."""
        return {"seconds": self.elapsed(), "step": self.step, "finished": finished, "tiny": tiny}

    def log(self, folder: Path, loss: float, rate: float, steps_per_second: float, **others: Any) -> None:
        """Prints a line of figures and adds it to the log. Raises if the loss is no number."""
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {self.step}")
        line = {
            "step": self.step,
            "seconds": round(self.elapsed()),
            "loss": round(loss, 4),
            "rate": round(rate, 6),
            "steps_per_second": round(steps_per_second, 2),
            **others,
        }
        print(json.dumps(line), flush=True)
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


@contextmanager
def workers(run: Run, count: int, first_step: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that write the shards still needed; they end with the run."""
    run.plan.folder.mkdir(parents=True, exist_ok=True)
    first = first_step * run.rows // ROWS_PER_SHARD
    command = [
        sys.executable,
        "-m",
        "training.shards",
        "--seed",
        str(run.plan.seed),
        "--length",
        str(run.plan.length),
        "--folder",
        str(run.plan.folder),
        "--tokenizer",
        str(run.plan.tokenizer),
        "--end",
        str(run.shards),
        "--step",
        str(count),
        *(["--polish"] if run.plan.polish else []),
    ]
    started = [subprocess.Popen([*command, "--first", str(first + at)], cwd=ROOT) for at in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def batches(run: Run, step: int, writers: list[subprocess.Popen[bytes]]) -> Iterator[Tensor]:
    """The rows of each step from `step` on, waiting for shards that are still being written."""
    per_shard = ROWS_PER_SHARD // run.rows
    for at in range(step, run.steps):
        number, part = divmod(at, per_shard)
        if part == 0 or at == step:
            rows = _shard(run.plan.path(number), writers)
            if part == 0 and number > 1:
                run.plan.path(number - 2).unlink(missing_ok=True)
        yield torch.from_numpy(rows[part * run.rows : (part + 1) * run.rows].astype(np.int32))


def _shard(path: Path, writers: list[subprocess.Popen[bytes]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    while not path.exists():
        if any(writer.poll() for writer in writers):
            raise RuntimeError(f"a worker failed before it wrote {path.name}")
        time.sleep(0.05)
    rows: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = np.load(path)
    return rows


@dataclass(frozen=True, slots=True)
class Trainer:
    """The network with what a step needs, on one device."""

    network: Network
    optimizer: AdamW
    cos: Tensor
    sin: Tensor
    attention: str

    @property
    def device(self) -> torch.device:
        return self.cos.device

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def loss(self, packed: Tensor) -> Tensor:
        packed = packed.to(self.device, non_blocking=True)
        tokens, labels, mask = self.inputs(packed)
        with self.precision():
            hidden = self.network(tokens, self.cos, self.sin, mask)
            return self.network.loss(hidden, labels)

    def inputs(self, packed: Tensor) -> tuple[Tensor, Tensor, Mask]:
        return unpack_rows(packed, self.attention)

    def step(self, packed: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(packed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def trainer(run: Run, shape: Shape, attention: str, device: torch.device) -> Trainer:
    torch.manual_seed(run.seed)
    network = Network(shape).to(device)
    matrices = [p for p in network.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=run.peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    cos, sin = rotations(shape, run.plan.length)
    if device.type == "cuda":
        for block in network.model.layers:
            block.compile(dynamic=False)
        network.loss = torch.compile(network.loss, dynamic=False)
    return Trainer(network, optimizer, cos.to(device), sin.to(device), attention)


def checked(found: Trainer, packed: Tensor) -> None:
    """Stops a run whose block-sparse attention is not what the plain mask gives."""
    tokens, _, sparse_mask = found.inputs(packed.to(found.device))
    _, _, dense_mask = replace(found, attention="dense").inputs(packed[:2].to(found.device))
    with found.precision():
        sparse = found.network(tokens, found.cos, found.sin, sparse_mask)[:2].detach().float()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            dense = found.network(tokens[:2], found.cos, found.sin, dense_mask).float()
    apart = float((sparse - dense).abs().mean() / dense.abs().mean())
    print(f"attention check: {found.attention} is {apart:.5f} away from the plain mask", flush=True)
    if apart > 0.03:
        raise RuntimeError("the attention differs from the plain mask; train with --attention causal")


def train(run: Run, found: Trainer, state: Path, until: float, count: int) -> bool:
    """Trains until the last step, or saves the state when the time is over; whether it is finished."""
    step = checkpoints.load(state, found.network, found.optimizer)
    state.parent.mkdir(parents=True, exist_ok=True)
    log = (state.parent / "log.jsonl").open("a")
    began, tokens, first = time.monotonic(), 0, step
    with workers(run, count, step) as writers:
        for packed in batches(run, step, writers):
            loss = found.step(packed, run.rate(step))
            step, tokens = step + 1, tokens + packed.numel()
            if step % 20 == 0 or step - first <= 3 or step == run.steps:
                _report(log, step, loss.item(), tokens, time.monotonic() - began)
                if step - first == 20:
                    began, tokens = time.monotonic(), 0
            if time.monotonic() > until and step < run.steps:
                checkpoints.save(state, step, found.network, found.optimizer)
                print(f"out of time at step {step} of {run.steps}; start again to go on", flush=True)
                return False
    return True


def _report(log: object, step: int, loss: float, tokens: int, seconds: float) -> None:
    line = {"step": step, "loss": round(loss, 5), "tokens_per_second": round(tokens / max(seconds, 1e-6))}
    print(json.dumps(line), file=log, flush=True)  # type: ignore[call-overload]
    if step % 100 == 0 or step <= 40:
        print(json.dumps(line), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help=f"{STEPS}, or {POLISH_STEPS} to polish")
    parser.add_argument("--rows", type=int, default=32, help="rows in a step")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--minutes", type=float, default=8.0, help="save the state and stop after this time")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--attention", choices=("flex", "dense", "causal"), default=None)
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "training", help="shards, state and log")
    parser.add_argument("--into", type=Path, default=SPROUT, help="the folder of the finished model")
    parser.add_argument(
        "--polish", action="store_true", help="the second stage: goes on from the model in --into, shorter and gentler"
    )
    parser.add_argument("--smoke", action="store_true", help="60 steps and an export, to see that everything works")
    parser.add_argument(
        "--tiny", action="store_true", help="with a minuscule network, for a computer without accelerator"
    )
    return parser.parse_args()


def main() -> int:
    began, given = time.monotonic(), arguments()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made(SPROUT, given.seed)
    steps = given.steps or (POLISH_STEPS if given.polish else STEPS)
    steps = 60 if given.smoke else steps
    stage = "polish" if given.polish else "train"
    run = Run(
        given.seed,
        steps,
        given.rows,
        Plan(given.seed + given.polish, given.length, given.work / f"{stage}-shards", SPROUT, given.polish),
        peak=POLISH_PEAK if given.polish else 2e-3,
        warm_up=min(WARM_UP, steps // 4),
    )
    shape = TINY if given.tiny else Shape()
    found = trainer(run, shape, given.attention or ("flex" if device.type == "cuda" else "dense"), device)
    if given.polish:
        export.restore(found.network, given.into)
    if found.attention == "flex":
        rows = torch.randint(9, 4000, (given.rows, given.length), dtype=torch.int32)
        rows[:, :: given.length // 5] |= int(STARTS)
        checked(found, rows)
    if not train(run, found, given.work / f"{stage}-state", began + given.minutes * 60, given.workers):
        return 3
    export.save(found.network, given.into)
    print(f"trained and saved in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
