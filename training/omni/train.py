"""Trains Sprout Omni: `python3 -m training.omni.train --minutes 9 --out OUT`.

Workers write shards of text and of media while the network trains on those already there. The learning rate follows the
clock, not the number of steps, so that a run ends when its time does. A run that is out of time saves its weights and
its state; started again with `--resume`, it goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from training.mixture import samples
from training.network import Mask, unpack_rows
from training.omni import evaluate, shards, tokens, weights
from training.omni.network import TINY, Media, OmniNetwork, OmniShape, parameters_of
from training.omni.pool import Batch, Pool, media_batches, text_batches
from training.phrasings import Split
from training.shards import TOKEN, encoded
from training.tokenizer import SPROUT, load, pieces
from training.train import Clock

ROOT = Path(__file__).parent.parent.parent
SAVE_EVERY = 120


@contextmanager
def workers(given: argparse.Namespace, folder: Path, seed: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that write shards of both kinds; they end with the run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text_count = max(1, given.workers * (6 if given.polish else 3) // 10)
    media_count = max(1, given.workers - text_count)
    shared = ["--seed", str(seed), "--length", str(given.length), "--folder", str(folder)]
    text = [sys.executable, "-m", "training.shards", *shared, "--tokenizer", str(SPROUT), "--end", "1000000"]
    text += ["--polish"] if given.polish else []
    media = [sys.executable, "-m", "training.omni.shards", *shared, "--rows", str(media_rows(given))]
    commands = [[*text, "--step", str(text_count), "--first", str(at)] for at in range(text_count)]
    commands += [[*media, "--step", str(media_count), "--first", str(at)] for at in range(media_count)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = [subprocess.Popen(command, cwd=ROOT, env=settings) for command in commands]
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


@dataclass(frozen=True, slots=True)
class Trainer:
    network: OmniNetwork
    optimizer: AdamW
    attention: str
    device: torch.device

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def loss(self, text: Batch | None, media: Batch) -> Tensor:
        packed, positions = _joined(text, media)
        ids, labels, mask = self.inputs(packed)
        cos, sin = self.network.rotations(positions)
        with self.precision():
            assert media[2] is not None
            hidden = self.network(self.network.embed(ids, varied(media[2])), cos, sin, mask)
            return self.network.loss(hidden, labels)

    def inputs(self, packed: Tensor) -> tuple[Tensor, Tensor, Mask]:
        return unpack_rows(packed, self.attention)

    def step(self, text: Batch | None, media: Batch, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(text, media)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _joined(text: Batch | None, media: Batch) -> tuple[Tensor, Tensor]:
    """Tokens and positions of all rows, those with media first."""
    assert media[1] is not None
    if text is None:
        return media[0], media[1].int()
    plain = torch.arange(text[0].shape[1], device=text[0].device, dtype=torch.int32).expand(3, len(text[0]), -1)
    return torch.cat([media[0], text[0]]), torch.cat([media[1].int(), plain], 1)


def varied(media: Media) -> Media:
    """The media a little different each time: light and noise; level, noise, and bands that are left out."""
    device, pictures, chunks = media.patches.device, len(media.patches), len(media.chunks)
    light = 1 + 0.12 * (torch.rand(pictures, 1, 1, device=device) - 0.5)
    noise = 5 * torch.rand(pictures, 1, 1, device=device) ** 3
    patches = media.patches * light + noise * torch.randn(media.patches.shape, device=device)
    levels = media.chunks.float() / 64 - 2 + 0.3 * (torch.rand(chunks, 1, 1, device=device) - 0.5)
    levels += 0.08 * torch.rand(chunks, 1, 1, device=device) * torch.randn(levels.shape, device=device)
    for axis, widest in ((1, 8), (2, 14)):
        at = torch.arange(levels.shape[axis], device=device)
        first = (torch.rand(chunks, 1, device=device) * len(at)).int()
        width = (torch.rand(chunks, 1, device=device) * widest).int()
        hidden = (at >= first) & (at < first + width)
        levels = levels.masked_fill(hidden[:, :, None] if axis == 1 else hidden[:, None, :], -0.5)
    return replace(media, patches=patches.clamp(0, 255), chunks=levels)


def trainer(shape: OmniShape, attention: str, device: torch.device, peak: float) -> Trainer:
    torch.manual_seed(1)
    network = OmniNetwork(shape)
    network.to(device)
    matrices = [p for p in network.parameters() if p.ndim >= 2]
    others = [p for p in network.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    return Trainer(network, optimizer, attention, device)


def compiled(found: Trainer) -> None:
    for block in found.network.language_model.layers:
        block.compile(dynamic=False)
    found.network.loss = torch.compile(found.network.loss, dynamic=False)  # type: ignore[method-assign]


def sample_rows(count: int, length: int) -> Tensor:
    """Rows of text for the take-over of Sprout's decoder."""
    tokenizer = load(SPROUT)
    batch = list(islice(samples(11, 0, Split.TRAIN, pieces(tokenizer)), count * 8))
    flat = np.concatenate(encoded(tokenizer, batch)) & TOKEN
    return torch.from_numpy(np.resize(flat, (count, length)).astype(np.int64))


def checked(found: Trainer, text: Batch | None, media: Batch) -> None:
    """Stops a run whose block-sparse attention is not what the plain mask gives."""
    packed, positions = _joined(text, media)
    ids, _, sparse = found.inputs(packed)
    cos, sin = found.network.rotations(positions)
    with found.precision():
        x = found.network.embed(ids, media[2])
        first = found.network(x, cos, sin, sparse)[:2].detach().float()
        _, _, dense = replace(found, attention="dense").inputs(packed[:2])
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            second = found.network(x[:2], cos[:2], sin[:2], dense).float()
    apart = float((first - second).abs().mean() / second.abs().mean())
    print(f"attention check: {found.attention} is {apart:.5f} away from the plain mask", flush=True)
    if not apart < 0.03:
        raise RuntimeError("the attention differs from the plain mask; train with --attention causal")


def check_generators() -> None:
    """Stops at once where pictures can't be drawn or words not be spoken."""
    began = time.monotonic()
    found = shards.shard(0, 0, 2048, tokens.make(), rows=1)
    seconds = time.monotonic() - began
    print(f"generators: {len(found['grids'])} pictures, {len(found['frames'])} sounds in {seconds:.1f} s", flush=True)


def restore(found: Trainer, given: argparse.Namespace, clock: Clock) -> str:
    """Fills network, optimizer and clock; says from where."""
    if (given.work / "state.pt").exists():
        about, source = weights.load_state(given.work / "state.pt", found.network, found.optimizer), "this machine"
    elif given.resume and (given.resume / "run.json").exists():
        about, source = weights.load(given.resume, found.network), str(given.resume)
    elif given.resume:
        weights.load_model(given.resume, found.network)
        return str(given.resume)
    else:
        if not given.tiny:
            weights.start_from_sprout(found.network, sample_rows(8, 1024))
            found.network.to(found.device)
        return "Sprout" if not given.tiny else "nothing"
    clock.spent, clock.step = about["seconds"], about["step"]
    return f"{source}, step {clock.step}, {clock.spent:.0f} s of training"


def media_rows(given: argparse.Namespace) -> int:
    """The rows with media in a step; a shard of media has as many, so that the first one is soon there."""
    return max(1, int(given.rows) // (4 if given.polish else 2))


def train(found: Trainer, given: argparse.Namespace, clock: Clock, until: float) -> bool:
    """Trains until the run or the time of this command is over; whether the run is finished."""
    with_media = media_rows(given)
    folder = given.work / "shards"
    with workers(given, folder, given.seed + 1000 * clock.step) as writers:
        load_text = partial(text_batches, rows=given.rows - with_media, device=found.device)
        load_media = partial(media_batches, rows=with_media, device=found.device)
        text = Pool(folder, "shard-?????.npy", load_text, 4e9)
        media = Pool(folder, "media-*.npz", load_media, given.pool * 1e9)
        try:
            return _loop(found, given, clock, until, (text, media, writers))
        finally:
            text.close()
            media.close()


def _loop(
    found: Trainer,
    given: argparse.Namespace,
    clock: Clock,
    until: float,
    source: tuple[Pool, Pool, list[subprocess.Popen[bytes]]],
) -> bool:
    text, media, writers = source
    first = clock.step
    if found.attention == "flex":
        checked(found, text.next(writers), media.next(writers))
    found.step(text.next(writers), media.next(writers), 0.0)
    clock.began = last = saved = time.monotonic()
    if given.last:
        clock.total = clock.spent + until - clock.began
    print(f"first step after {clock.began - given.began:.0f} s; {clock.total:.0f} s of training in all", flush=True)
    while True:
        rate = clock.rate(given.peak, given.peak / 100, clock.step - first)
        loss = found.step(text.next(writers), media.next(writers), rate)
        clock.step += 1
        if clock.step % given.report == 0:
            per_second = given.report / (time.monotonic() - last)
            last = time.monotonic()
            pools = (text, media)
            clock.log(
                given.out,
                loss.item(),
                rate,
                per_second,
                tokens_per_second=round(per_second * given.rows * given.length),
                fresh=[pool.fresh_count for pool in pools],
                repeated=[pool.repeated_count for pool in pools],
            )
            if time.monotonic() - saved > SAVE_EVERY:
                saved = time.monotonic()
                weights.save(given.out, found.network, clock.state(finished=False, tiny=given.tiny))
        if clock.elapsed() >= clock.total or (given.steps and clock.step - first >= given.steps):
            return True
        if time.monotonic() > until:
            return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0, help="save and stop this command after this time")
    parser.add_argument("--total", type=float, default=15.0, help="minutes of training in all, over all commands")
    parser.add_argument("--last", action="store_true", help="end the run in this command: the time left is its rest")
    parser.add_argument("--steps", type=int, default=0, help="end the run after so many steps of this command")
    parser.add_argument("--rows", type=int, default=32, help="rows in a step; half of them, or a quarter, with media")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--peak", type=float, default=1.2e-3, help="the highest learning rate")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) - 1))
    parser.add_argument("--pool", type=float, default=70.0, help="gigabytes of media kept on the device")
    parser.add_argument("--attention", choices=("flex", "dense", "causal"), default=None)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--out", type=Path, required=True, help="weights, log and figures")
    parser.add_argument("--resume", type=Path, default=None, help="the --out of the command before, or a whole model")
    parser.add_argument("--polish", action="store_true", help="more text, and that of Sprout's second stage")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "training" / "omni", help="shards and state")
    parser.add_argument("--cases", type=int, default=200, help="cases of each bar at the end; 0 for none")
    parser.add_argument("--report", type=int, default=100, help="steps between two lines of the log")
    parser.add_argument("--tiny", action="store_true", help="a minuscule network, for a computer without accelerator")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    given.began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each number of pictures
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    check_generators()
    clock = Clock(given.total * 60)
    attention = given.attention or ("flex" if device.type == "cuda" and not given.eager else "dense")
    found = trainer(TINY if given.tiny else OmniShape(), attention, device, given.peak)
    print(f"{parameters_of(found.network)} parameters; starts from {restore(found, given, clock)}", flush=True)
    if device.type == "cuda" and not given.eager:
        compiled(found)
    finished = train(found, given, clock, given.began + given.minutes * 60)
    about = clock.state(finished, given.tiny)
    weights.save(given.out, found.network, about)
    weights.save_state(given.work / "state.pt", found.network, found.optimizer, about)
    print(f"saved after {time.monotonic() - given.began:.0f} s; finished: {finished}", flush=True)
    if given.cases:
        figures = evaluate.measured(found.network, tokens.make(), given.cases, 7, text_cases=given.cases // 4)
        (given.out / "evaluation.json").write_text(json.dumps(figures, ensure_ascii=False, indent=1) + "\n")
        print(evaluate.table(figures), flush=True)
    print(f"done after {time.monotonic() - given.began:.0f} s", flush=True)
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
