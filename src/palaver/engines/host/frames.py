"""The protocol between supervisor and engine process: length-prefixed JSON frames. Values are packed by type name."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from palaver import constraints, errors, generation, phases, sampling
from palaver.engines import base

_LENGTH = struct.Struct("!I")
MAX_FRAME = 512 * 1024 * 1024

_TYPES: dict[str, Any] = {
    name: cls
    for module in (constraints, generation, phases, sampling, base)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and (is_dataclass(cls) or issubclass(cls, Enum))
}
_ERRORS: dict[str, type[errors.PalaverError]] = {
    name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, errors.PalaverError)
}


def pack(value: Any) -> Any:
    """A value as JSON types. Lists are unpacked as tuples."""
    if type(value) is generation.Step and value.drawn_logprob is None:  # the most frequent value, so it is short
        return {"step": [value.token_id, value.logprob]}
    if isinstance(value, Enum):
        return {"enum": type(value).__name__, "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, "with": {f.name: pack(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, list | tuple):
        return list(value) if _is_all_ints(value) else [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value) if _is_all_ints(value) else tuple(unpack(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "step" in value:
        return generation.Step(*value["step"])
    if "type" in value:
        return _TYPES[value["type"]](**{name: unpack(item) for name, item in value["with"].items()})
    if "enum" in value:
        return _TYPES[value["enum"]](value["value"])
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    return frozenset(value["set"])


def _is_all_ints(values: list[Any] | tuple[Any, ...]) -> bool:
    """A fast path for token ids, of which there may be many."""
    return all(type(value) is int for value in values)


def pack_error(error: errors.PalaverError) -> dict[str, Any]:
    extra = {name: item for name, item in vars(error).items() if isinstance(item, str | int | float | bool | None)}
    return {"error": type(error).__name__, "says": str(error), "with": extra}


def unpack_error(value: dict[str, Any]) -> errors.PalaverError:
    """An error of the same type and message. Does not call the type's constructor."""
    cls = _ERRORS.get(value["error"], errors.EngineError)
    error = cls.__new__(cls)
    Exception.__init__(error, value["says"])
    error.__dict__.update(value["with"])
    return error


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next frame; None if the connection is closed."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        assert size <= MAX_FRAME
        frame: dict[str, Any] = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return frame


def encode_frame(frame: dict[str, Any]) -> bytes:
    data = json.dumps(frame, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


_MAX_FRACTION = 0.99


class LoadProgress:
    """How far the loading of a model is."""

    def __init__(self) -> None:
        self.note = "starting"
        self._start_bytes: int | None = None
        self._total_bytes = 0

    def begin(self, folder: Path) -> None:
        """Call before the weights are read."""
        self.note = "loading the weights"
        self._total_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._start_bytes = _resident_bytes()

    @property
    def fraction(self) -> float | None:
        """From 0 to 1, estimated from this process's memory; None if that is unknown."""
        now = _resident_bytes()
        if self._start_bytes is None or now is None or not self._total_bytes:
            return None
        return min(_MAX_FRACTION, max(0.0, (now - self._start_bytes) / self._total_bytes))


def _resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
