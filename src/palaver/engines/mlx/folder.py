"""Recognises the folders of MLX models, and the machines that MLX is made for. Imports nothing of MLX."""

from __future__ import annotations

import importlib.util
import json
import platform
import struct
import sys
from pathlib import Path

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
