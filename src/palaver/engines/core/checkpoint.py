"""A model's folder: checks that its files are safe to load, and reads the sizes and places of its tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaver.errors import BrokenModel, NoWeights, UnknownModel, UnsafeWeights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from palaver.gguf import GGUFHeader

PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER = 100_000_000


CheckConfig = Callable[[Path, dict[str, Any]], None]
"""Raises a ModelError if a model of this configuration, in this folder, can't be loaded."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors or GGUF file."""

    path: Path
    offset: int
    """Of its first byte in the file."""
    dtype: str
    """The format's name of the element type, such as BF16."""
    shape: tuple[int, ...]
    nbytes: int
    paired_heads: int = 0
    """Heads whose rows lie in pairs that turn together, as llama.cpp stores the queries and keys of Llama; 0 where the
    first halves of all pairs come first."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The files of a model that is safe to load: a configuration, and complete safetensors or GGUF files."""

    name: str
    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    header: GGUFHeader | None = None
    """Of a GGUF file."""
    rope_factors: NDArray[np.float32] | None = None
    """By which a GGUF file divides the frequencies of the rotary embedding."""


def open_checkpoint(model: str | Path, check_config: CheckConfig | None = None) -> Checkpoint:
    """Opens a model's folder. Reads headers only. Raises a ModelError if the files cannot be loaded."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UnknownModel(str(model), "there is no such folder.")
    config = _config(folder)
    if check_config is not None:
        check_config(folder, config)
    weights = _weights(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in weights:
        tensors |= read_header(path)
    return Checkpoint(str(model), folder, config, weights, tensors)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        if not _safetensors(folder):
            raise _no_weights(folder)
        raise BrokenModel(f"The folder {str(folder)!r} contains no config.json: the model's architecture is not known.")
    config = read_json(path)
    if not isinstance(config, dict):
        raise BrokenModel(f"{str(path)!r} isn't a model's configuration: expected a JSON object.")
    return config


def _weights(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        found = _safetensors(folder)
        if not found:
            raise _no_weights(folder)
        single = folder / "model.safetensors"
        return (single,) if single in found else found
    paths = tuple(folder / name for name in _shards(index))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise BrokenModel(f"The model in {str(folder)!r} lacks the files {', '.join(missing[:3])}: download it again.")
    return paths


def _safetensors(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.safetensors")))


def _no_weights(folder: Path) -> NoWeights | UnsafeWeights:
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    return UnsafeWeights(str(folder), ", ".join(pickles[:3])) if pickles else NoWeights(str(folder))


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index)
    if not isinstance(weight_map, dict) or not isinstance(weight_map.get("weight_map"), dict):
        raise BrokenModel(f"{str(index)!r} isn't an index of weights: expected an object 'weight_map'.")
    return sorted({str(name) for name in weight_map["weight_map"].values()})


def read_json(path: Path) -> Any:
    """Raises BrokenModel where it isn't JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{str(path)!r} can't be read as JSON: {_reason(error)}.") from error


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors a file declares, after checking that the file is as long as they need."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != 8 + size + end:
            raise ValueError("its length differs from its header")
        return {name: _stored_tensor(path, 8 + size, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise BrokenModel(f"{str(path)!r} isn't a complete safetensors file: {_reason(error)}.") from error


def _stored_tensor(path: Path, start: int, entry: dict[str, Any]) -> StoredTensor:
    first, end = entry["data_offsets"]
    return StoredTensor(path, start + first, entry["dtype"], tuple(entry["shape"]), end - first)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def has_processor(folder: Path) -> bool:
    """Whether the model's files describe a processor for media."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)
