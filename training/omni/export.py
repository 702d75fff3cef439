"""The finished network as files that transformers loads: weights, configuration, tokenizer, template, processor.

`python3 -m training.omni.export --model RUN --into FOLDER` writes them from the weights of a run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

from training.omni import tokens, weights
from training.omni.features import CELL, MAX_PIXELS, MELS, MERGE, MIN_PIXELS, PATCH
from training.omni.network import DEVIATION, MEAN, TINY, OmniNetwork, OmniShape, library_config
from training.tokenizer import SPROUT

LIMIT = 30_000_000
IDS = {
    "image_token_id": tokens.IDS[tokens.IMAGE],
    "video_token_id": tokens.IDS[tokens.VIDEO],
    "audio_token_id": tokens.IDS[tokens.AUDIO],
    "vision_start_token_id": tokens.IDS[tokens.VISION_BEGIN],
    "vision_end_token_id": tokens.IDS[tokens.VISION_END],
    "audio_start_token_id": tokens.IDS[tokens.AUDIO_BEGIN],
    "audio_end_token_id": tokens.IDS[tokens.AUDIO_END],
}
_PARTS = """\
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{- part.text -}}
            {%- elif part.type == 'image' or part.type == 'image_url' -%}{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
            {%- elif part.type == 'video' -%}{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
            {%- elif part.type == 'audio' or part.type == 'input_audio' -%}
                {{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
            {%- endif -%}
        {%- endfor -%}
"""


def as_thinker(network: OmniNetwork) -> Qwen2_5OmniThinkerForConditionalGeneration:
    model = Qwen2_5OmniThinkerForConditionalGeneration(Qwen2_5OmniThinkerConfig(**library_config(network.shape, IDS)))
    found: dict[str, Tensor] = {f"model.{k}": v.detach().float().cpu() for k, v in network.state_dict().items()}
    found["lm_head.weight"] = found["model.language_model.embed_tokens.weight"]
    model.load_state_dict(found)
    return model.eval()


def restore(network: OmniNetwork, folder: Path) -> None:
    """The weights of a finished model back into a network."""
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    found = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    network.load_state_dict({name: found[name] for name in network.state_dict()})


def save(network: OmniNetwork, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = as_thinker(network).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[2, 0], pad_token_id=0
    )
    model.save_pretrained(folder)
    tokens.save(folder)
    (folder / "chat_template.jinja").write_text(template())
    for name, settings in processors().items():
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if size > LIMIT:
        raise RuntimeError(f"the weights take {size} bytes, more than {LIMIT}")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def template() -> str:
    """Sprout's chat template, with parts that are pictures, films and sounds."""
    lines = (
        (SPROUT / "chat_template.jinja").read_text().replace("Sprout's chat template.", "Sprout Omni's chat template.")
    )
    before, after = lines.split("        {%- for part in content -%}\n", 1)
    _, after = after.split("        {%- endfor -%}\n", 1)
    return before + _PARTS + after


def processors() -> dict[str, dict[str, Any]]:
    """The settings of transformers' processors, by file."""
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": list(MEAN),
        "image_std": list(DEVIATION),
    }
    sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "return_attention_mask": True}
    assert CELL == PATCH * MERGE
    return {"preprocessor_config.json": {**image, **sound, "processor_class": "Qwen2_5OmniProcessor"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the --out of the training")
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    about = json.loads((given.model / "run.json").read_text())
    network = OmniNetwork(TINY if about["tiny"] else OmniShape())
    weights.load(given.model, network)
    save(network, given.into)
    total = sum(path.stat().st_size for path in given.into.iterdir())
    print(f"{given.into}: {total / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
