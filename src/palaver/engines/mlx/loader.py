"""Loads a folder with mlx-lm: unquantised safetensors, or weights that mlx-lm converted and quantised, with a LoRA
adapter if there is one. Imports MLX only when a model is loaded."""

from __future__ import annotations

import importlib.util
import json
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from palaver.engines.core.checkpoint import Checkpoint, read_json
from palaver.errors import BadParameter, BrokenModel, UnsafeWeights

INSTALL = "pip install 'palaver[mlx]'"
MAX_HEADER = 100_000_000


def is_mlx_folder(folder: Path) -> bool:
    """Whether mlx-lm wrote the folder: its configuration has MLX's quantisation, or its weights name MLX."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if isinstance(config, dict) and isinstance(config.get("quantization"), dict):
        return True
    return any(_weights_format(path) == "mlx" for path in sorted(folder.glob("*.safetensors"))[:1])


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def is_installed() -> bool:
    return all(importlib.util.find_spec(package) is not None for package in ("mlx", "mlx_lm"))


def _weights_format(path: Path) -> str | None:
    """The format that a safetensors file names in its metadata."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size <= MAX_HEADER else {}
        found = header["__metadata__"]["format"]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return found if isinstance(found, str) else None


PLAIN_ROTARY = "default"
DTYPES = ("float32", "bfloat16", "float16")


@contextmanager
def _file_limit() -> Iterator[None]:
    """mlx-lm sets the process's limit of open files when it is imported, also where that lowers it for good."""
    import resource  # not every system has it

    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit


def import_mlx() -> None:
    """Imports mlx-lm. Raises BrokenModel where it isn't installed."""
    if not is_installed():
        raise BrokenModel(f"MLX models take the Python packages mlx and mlx-lm, which aren't installed: {INSTALL}")
    with _file_limit():
        import mlx_lm  # noqa: F401


def load_module(checkpoint: Checkpoint, dtype: str | None, adapter: Path | None = None) -> Any:
    """The model with all of its parameters evaluated, so that any thread can use it. None: the stored dtype."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    if dtype is not None and dtype not in DTYPES:
        raise BadParameter("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    try:
        module, _ = load_model(checkpoint.folder, model_config=config_changes(checkpoint.config))
        if dtype is not None:
            module.set_dtype(getattr(mx, dtype))
        mx.eval(module.parameters())
    except Exception as error:
        reason = _first_line(error)
        advice = "" if is_mlx_folder(checkpoint.folder) else " --engine torch may run it."
        raise BrokenModel(f"The model {checkpoint.name!r} couldn't be loaded by mlx-lm: {reason}{advice}") from error
    if adapter is not None:
        apply_adapter(module, adapter)
    return module.eval()


def config_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that mlx-lm reads, where transformers 5 writes them under others.

    mlx-lm takes defaults of its own for what it doesn't find, and would compute something else.
    """
    changes = _rotary_settings(config.get("rope_parameters"))
    changes["num_experts"] = config.get("num_local_experts")
    return {name: value for name, value in changes.items() if value is not None and config.get(name) is None}


def _rotary_settings(parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        return {}
    by_layer = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    rotary = by_layer.get("full_attention", parameters)
    settings = {name: rotary.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    if rotary.get("rope_type", PLAIN_ROTARY) != PLAIN_ROTARY:
        settings["rope_scaling"] = dict(rotary)
    if "sliding_attention" in by_layer:
        settings["rope_local_base_freq"] = by_layer["sliding_attention"].get("rope_theta")
    return settings


OWN_ADAPTER, PEFT_ADAPTER, PICKLED_ADAPTER = "adapters.safetensors", "adapter_model.safetensors", "adapter_model.bin"
"""The files of adapters: as mlx-lm writes them, and as peft does."""
PEFT_PREFIX = "base_model.model."
PEFT_PARTS = (".lora_A.weight", ".lora_B.weight")


def apply_adapter(module: Any, folder: Path) -> None:
    """Adds a LoRA adapter to the layers of a model: one that mlx-lm wrote, or one of peft. It is merged into weights
    that aren't quantised. Raises BrokenModel or UnsafeWeights where there is none or it doesn't fit."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import load_adapters

    try:
        if (folder / OWN_ADAPTER).is_file():
            load_adapters(module, str(folder))
        elif (folder / PEFT_ADAPTER).is_file():
            _load_peft(module, folder)
        elif (folder / PICKLED_ADAPTER).is_file():
            raise UnsafeWeights(str(folder), PICKLED_ADAPTER)
        else:
            raise BrokenModel(f"The folder {str(folder)!r} contains no adapter ({PEFT_ADAPTER} or {OWN_ADAPTER}).")
        _merge_adapter(module)
        mx.eval(module.parameters())
    except (BrokenModel, UnsafeWeights):
        raise
    except Exception as error:
        raise BrokenModel(f"The adapter in {str(folder)!r} does not fit the model: {_first_line(error)}") from error


def _load_peft(module: Any, folder: Path) -> None:
    """peft's matrices as layers of mlx-lm. Raises ValueError for what these can't compute."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear

    config = read_json(folder / "adapter_config.json")
    tensors: dict[str, Any] = cast(Any, mx.load(str(folder / PEFT_ADAPTER)))
    other = [name for name in ("use_dora", "alpha_pattern", "fan_in_fan_out") if config.get(name)]
    other += [name for name in tensors if not name.startswith(PEFT_PREFIX) or not name.endswith(PEFT_PARTS)]
    if other:
        raise ValueError(f"MLX doesn't compute {other[0]!r} of an adapter. --engine torch may.")
    layers = dict(module.named_modules())
    for name in sorted(tensors):
        path, part = name.removeprefix(PEFT_PREFIX).split(".lora_")
        if part.startswith("B"):
            continue
        a, b = tensors[name], tensors[name.replace(*PEFT_PARTS)]
        rank = a.shape[0]
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        layer = layers.get(path)
        if layer is None:
            raise ValueError(f"there is no layer {path!r}.")
        adapted = LoRALinear.from_base(layer, rank, scale=scale)
        if (adapted.lora_a.shape, adapted.lora_b.shape) != (a.T.shape, b.T.shape):
            raise ValueError(f"the layer {path!r} has another size.")
        adapted.lora_a, adapted.lora_b = a.T, b.T
        module.update_modules(tree_unflatten([(path, adapted)]))


def _merge_adapter(module: Any) -> None:
    """A layer that isn't quantised becomes an ordinary one, which takes less time."""
    import mlx.nn as nn
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear

    plain = [
        (path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, LoRALinear) and isinstance(layer.linear, nn.Linear)
    ]
    module.update_modules(tree_unflatten([(path, layer.fuse()) for path, layer in plain]))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300].rstrip(" .:") + "."
