"""A training run on disk, in pieces small enough to be carried: weights in 32 bits, Adam's moments in 16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PIECE = 15 * 2**20


def save(folder: Path, step: int, network: nn.Module, optimizer: Optimizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    flat = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in _parts(network, optimizer)]).numpy()
    for at in range(0, len(flat), PIECE):
        (folder / f"state-{at // PIECE}.bin").write_bytes(flat[at : at + PIECE].tobytes())
    (folder / "state.json").write_text(json.dumps({"step": step, "bytes": len(flat)}))


def load(folder: Path, network: nn.Module, optimizer: Optimizer) -> int:
    """Fills network and optimizer and returns the step to go on with; 0 where nothing was saved."""
    if not (folder / "state.json").exists():
        return 0
    meta = json.loads((folder / "state.json").read_text())
    pieces = range(-(-meta["bytes"] // PIECE))
    flat = torch.frombuffer(
        bytearray(b"".join((folder / f"state-{n}.bin").read_bytes() for n in pieces)), dtype=torch.uint8
    )
    at = 0
    for name, kind in (("weight", torch.float32), ("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.bfloat16)):
        for parameter in network.parameters():
            size = parameter.numel() * kind.itemsize
            _put(
                parameter, optimizer, name, flat[at : at + size].clone().view(kind).view(parameter.shape), meta["step"]
            )
            at += size
    return int(meta["step"])


def _parts(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    weights = [p.detach().float().cpu() for p in network.parameters()]
    moments = [
        optimizer.state[p][name].detach().to(torch.bfloat16).cpu()
        for name in ("exp_avg", "exp_avg_sq")
        for p in network.parameters()
    ]
    return weights + moments


def _put(parameter: nn.Parameter, optimizer: Optimizer, name: str, value: Tensor, step: int) -> None:
    if name == "weight":
        parameter.data.copy_(value)
        return
    state = optimizer.state[parameter]
    state[name] = value.to(parameter.device, torch.float32)
    state["step"] = torch.tensor(float(step), device=parameter.device)
