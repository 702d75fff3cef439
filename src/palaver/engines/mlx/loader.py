"""Loads a folder with mlx-lm: unquantised safetensors, or weights that mlx-lm converted and quantised. Imports MLX only
when a model is loaded."""

from __future__ import annotations

import importlib.util
import json
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from palaver.engines.core.checkpoint import Checkpoint
from palaver.errors import BadParameter, BrokenModel

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


def load_module(checkpoint: Checkpoint, dtype: str | None) -> Any:
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
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300].rstrip(" .:") + "."
        advice = "" if is_mlx_folder(checkpoint.folder) else " --engine torch may run it."
        raise BrokenModel(f"The model {checkpoint.name!r} couldn't be loaded by mlx-lm: {reason}{advice}") from error
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
