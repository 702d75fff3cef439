"""The finished network as files that every engine loads: bf16 safetensors, its configuration, sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from training.network import Network, Shape

LIMIT = 16_000_000


def as_qwen3(network: Network, shape: Shape) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**shape.config()))
    weights = {name: weight.detach().float().cpu() for name, weight in network.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def save(network: Network, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = as_qwen3(network, network.shape).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[2, 0], pad_token_id=0
    )
    model.save_pretrained(folder)
    _add_theta(folder / "config.json", network.shape.theta)
    (folder / "model.safetensors").chmod(0o644)
    size = (folder / "model.safetensors").stat().st_size
    if size > LIMIT:
        raise RuntimeError(f"the weights take {size} bytes, more than {LIMIT}")


def restore(network: Network, folder: Path) -> None:
    """The weights of a finished model back into a network."""
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({name: weights[name].float() for name in network.state_dict()})


def _add_theta(path: Path, theta: float) -> None:
    """Older readers look for `rope_theta` at the top."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rope_theta": theta}, indent=2) + "\n")
