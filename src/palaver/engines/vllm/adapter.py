"""A LoRA adapter for vLLM: what its files must be.

vLLM ignores matrices for layers that the model doesn't have, copies matrices of another size as far as they reach, and
ends its process at the first request with an adapter that it can't compute. So the files are checked first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from palaver.engines.core.checkpoint import Checkpoint, StoredTensor, read_header, read_json
from palaver.errors import BrokenModel, UnsafeWeights

WEIGHTS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
"""vLLM would load them."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for. An adapter may have any rank up to one of them."""
PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB]))")
_LAYER = re.compile(r"(?:.*\.)?(layers\.\d+\..+)")
_FLOATS = ("F32", "F16", "BF16")


def lora_arguments(adapter: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """The arguments with which vLLM makes room for the adapter. Raises a ModelError for one that it would not apply as
    it is."""
    if not (adapter / WEIGHTS).is_file():
        pickles = [name for name in PICKLES if (adapter / name).is_file()]
        if pickles:
            raise UnsafeWeights(str(adapter), pickles[0])
        raise BrokenModel(f"The folder {str(adapter)!r} contains no adapter ({WEIGHTS}).")
    settings = read_json(adapter / "adapter_config.json")
    rank = settings.get("r") if isinstance(settings, dict) else None
    if not isinstance(rank, int) or settings.get("peft_type", "LORA") != "LORA":
        raise BrokenModel(f"{str(adapter)!r} isn't a LoRA adapter: its adapter_config.json has no rank.")
    needed = max([rank, *_pattern_ranks(settings), *_check_matrices(adapter, checkpoint)])
    room = next((one for one in RANKS if one >= needed), None)
    if room is None:
        raise BrokenModel(f"The adapter in {str(adapter)!r} has the rank {needed}: vLLM takes ranks up to {RANKS[-1]}.")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def _pattern_ranks(settings: dict[str, Any]) -> Iterable[int]:
    pattern = settings.get("rank_pattern")
    return (one for one in pattern.values() if isinstance(one, int)) if isinstance(pattern, dict) else ()


def _check_matrices(adapter: Path, checkpoint: Checkpoint) -> list[int]:
    """The ranks of the adapter's matrices."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in read_header(adapter / WEIGHTS).items():
        match = _MATRIX.fullmatch(name.removeprefix(PREFIX))
        if match is None or len(tensor.shape) != 2:
            raise BrokenModel(f"vLLM doesn't compute {name!r} of an adapter. --engine torch may.")
        pairs.setdefault(match[1], {})[match[2] or match[3]] = tensor.shape
    if not pairs:
        raise BrokenModel(f"The adapter in {str(adapter)!r} has no matrices.")
    layers = _layers(checkpoint)
    for path, shapes in pairs.items():
        if reason := _misfit(path, shapes, layers):
            raise BrokenModel(f"The adapter in {str(adapter)!r} does not fit the model: {reason}.")
    return [shapes["A"][0] for shapes in pairs.values()]


def _layers(checkpoint: Checkpoint) -> dict[str, list[StoredTensor]]:
    """The tensors of the model's layers, by the part of the layer's name that all classes of a model share."""
    found: dict[str, list[StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        if match := _LAYER.fullmatch(name.rpartition(".")[0]):
            found.setdefault(match[1], []).append(tensor)
    return found


def _misfit(path: str, shapes: dict[str, tuple[int, ...]], layers: dict[str, list[StoredTensor]]) -> str:
    """Why two matrices don't fit; empty if they do. Experts and embeddings are left to vLLM, and so are the sizes of
    quantised weights."""
    if set(shapes) != {"A", "B"} or shapes["A"][0] != shapes["B"][1]:
        return f"the matrices of {path!r} don't belong together"
    match = _LAYER.fullmatch(path)
    if match is None or ".experts" in path:
        return ""
    tensors = layers.get(match[1])
    if tensors is None:
        return f"there is no layer {path!r}"
    size = (shapes["B"][0], shapes["A"][1])
    plain = [one.shape for one in tensors if one.dtype in _FLOATS and len(one.shape) == 2]
    fits = not plain or size in plain or size[::-1] in plain  # some models store their weights transposed
    return "" if fits else f"the layer {path!r} has another size"
