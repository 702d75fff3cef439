"""Checks that the transformers library knows a model's architecture, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from palaver.engines.core import checkpoint
from palaver.engines.core.checkpoint import Checkpoint
from palaver.errors import BrokenModel, UnsafeCode


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a model's folder. Reads headers only. Raises a ModelError if the files cannot be loaded."""
    return checkpoint.open_checkpoint(model, _check_architecture)


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if config.get("auto_map"):
        raise UnsafeCode(str(folder))
    raise BrokenModel(
        f"The configuration of {str(folder)!r} names the architecture {kind!r}, "
        "which this version of the transformers library doesn't know: a newer one may."
    )
