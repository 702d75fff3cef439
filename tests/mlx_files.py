"""Writes the embedded model as a folder for MLX."""

from __future__ import annotations

from pathlib import Path

from palaver.engines.mlx.loader import import_mlx
from palaver.models.resolver import resolve_folder


def convert_sprout(folder: Path, quantized: bool = False) -> Path:
    """As mlx-lm converts it: as it is, or quantised to 8 bits."""
    import_mlx()
    from mlx_lm import convert

    options = {"quantize": True, "q_bits": 8, "dtype": "float32"} if quantized else {}
    convert(str(resolve_folder("sprout")), str(folder), **options)
    return folder
