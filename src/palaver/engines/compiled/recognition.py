"""Which GGUF files compiled steps run. This module imports little: most commands only need to know that."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from palaver.errors import ModelError
from palaver.gguf import read_architecture

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss")
"""Those of `gguf_checkpoint.py`, which is slow to import."""


def can_run(file: Path) -> bool:
    """Whether it is a file of a decoder that they know, and there is a compiler or an earlier build of the steps."""
    if read_architecture(file) not in ARCHITECTURES:
        return False
    from palaver.engines.compiled.build import can_build  # slow to import

    facts = file.stat()
    return can_build() and _is_known(file, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=64)
def _is_known(file: Path, changed: int, size: int) -> bool:
    """`changed` and `size` tell another file of the same name."""
    from palaver.engines.compiled.engine import open_decoder
    from palaver.engines.core.runner import UnsupportedModel

    try:
        open_decoder(file)
    except (UnsupportedModel, ModelError):
        return False
    return True
