"""The finished network as a folder that Palaver's diffusion engine runs: weights, configuration, tokenizer, template.

`python3 -m training.diffusion.export --model RUN` writes it from the weights of a run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import GenerationConfig

from training import tokenizer as sprout
from training.diffusion.network import MASK_ID, MASK_TEXT, NOISY, DiffusionNetwork, shape_of
from training.export import LIMIT, as_qwen3
from training.network import TINY, Shape
from training.omni import weights
from training.tokenizer import SPROUT

FOLDER = SPROUT.parent / "sprout-diffusion"
DIFFUSION = {
    "mask_token_id": MASK_ID,
    "attention": "block_causal",
    "shift": True,
    "block_length": NOISY,
    "steps": NOISY,
    "temperature": 0.0,
}


def tokenizer() -> Tokenizer:
    """Sprout's tokenizer with the mask."""
    found = sprout.load(SPROUT)
    found.add_special_tokens([AddedToken(MASK_TEXT, special=True, normalized=False)])
    assert found.token_to_id(MASK_TEXT) == MASK_ID
    return found


def save(network: DiffusionNetwork, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = as_qwen3(network, network.shape).to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[2, 0], pad_token_id=0)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"rope_theta": network.shape.theta, "diffusion": DIFFUSION}
    path.write_text(json.dumps(config, indent=2) + "\n")
    sprout.save(tokenizer(), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token": MASK_TEXT}, indent=2) + "\n")
    shutil.copy(SPROUT / "chat_template.jinja", folder)
    (folder / "model.safetensors").chmod(0o644)
    size = sum(one.stat().st_size for one in folder.iterdir())
    if size > LIMIT:
        raise RuntimeError(f"the model takes {size} bytes, more than {LIMIT}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the --out of the training")
    parser.add_argument("--into", type=Path, default=FOLDER)
    given = parser.parse_args()
    about = json.loads((given.model / "run.json").read_text())
    network = DiffusionNetwork(shape_of(TINY if about["tiny"] else Shape()))
    weights.load(given.model, network)
    save(network, given.into)
    print(f"{given.into}: {sum(one.stat().st_size for one in given.into.iterdir()) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
