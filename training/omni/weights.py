"""The weights of a run in 16 bits, in files that are small enough to be carried, and where they start from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training import export
from training.network import Attention, Network, Shape, rotations
from training.omni.network import OmniNetwork
from training.tokenizer import SPROUT

PIECE = 15_000_000


def save(folder: Path, network: nn.Module, about: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in network.state_dict().items():
        if size + value.numel() * 2 > PIECE:
            parts.append({})
            size = 0
        parts[-1][name] = value.detach().to(torch.float16).cpu().contiguous()
        size += value.numel() * 2
    for number, part in enumerate(parts):
        save_file(part, folder / f"weights-{number}.safetensors")
    (folder / "run.json").write_text(json.dumps({**about, "files": len(parts)}) + "\n")


def load(folder: Path, network: nn.Module) -> dict[str, Any]:
    """Fills the network; returns what was saved about the run."""
    about: dict[str, Any] = json.loads((folder / "run.json").read_text())
    found: dict[str, Tensor] = {}
    for number in range(about["files"]):
        found |= load_file(folder / f"weights-{number}.safetensors")
    network.load_state_dict({name: value.float() for name, value in found.items()})
    return about


def load_model(folder: Path, network: nn.Module) -> None:
    """Fills the network with the weights of a finished model."""
    found = load_file(folder / "model.safetensors")
    named = {re.sub(r"^model\.", "language_model.", name): value.float() for name, value in found.items()}
    network.load_state_dict({name: named[name] for name in network.state_dict()})


def save_state(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> None:
    """Everything, for a run that goes on at the same machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict(), "about": about}, part)
    part.rename(path)


def load_state(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict(found["network"])
    optimizer.load_state_dict(found["optimizer"])
    about: dict[str, Any] = found["about"]
    return about


@torch.no_grad()
def start_from_sprout(network: OmniNetwork, rows: Tensor, folder: Path = SPROUT) -> None:
    """Takes over Sprout's decoder, which is a Qwen3.

    Qwen3 normalizes every query and key; Qwen2.5-Omni does not. The mean effect of these norms on the tokens in `rows`
    goes into the projections, and training does the rest.
    """
    sprout = Network(Shape())
    export.restore(sprout, folder)
    scales = _norm_scales(sprout, rows)
    weights = sprout.state_dict()
    mine = network.language_model.state_dict()
    for name, value in mine.items():
        old = weights.get(f"model.{name}")
        if name == "embed_tokens.weight" and old is not None:
            value[: len(old)] = old
        elif name.endswith(("q_proj.weight", "k_proj.weight")) and old is not None:
            value.copy_(old * scales[name.removesuffix("_proj.weight")][:, None])
        elif old is not None:
            value.copy_(old)
    network.language_model.load_state_dict(mine)


def _norm_scales(sprout: Network, rows: Tensor) -> dict[str, Tensor]:
    """By what the norms multiply each row of the projections on average."""
    found: dict[str, Tensor] = {}

    def watch(name: str, weight: Tensor) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            scale = torch.rsqrt(inputs[0].float().pow(2).mean(-1) + 1e-6).mean((0, 1))
            found[name] = (scale[:, None] * weight).flatten()

        return hook

    hooks = []
    for at, block in enumerate(sprout.model.layers):
        attention = block.self_attn
        assert isinstance(attention, Attention)
        for kind, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
            hooks.append(norm.register_forward_pre_hook(watch(f"layers.{at}.self_attn.{kind}", norm.weight)))
    cos, sin = rotations(sprout.shape, rows.shape[1])
    sprout(rows, cos, sin, None)
    for handle in hooks:
        handle.remove()
    return found
