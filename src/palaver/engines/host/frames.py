"""What crosses the boundary between processes: frames of JSON, values packed by the names of their types."""

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
    name: kind
    for module in (constraints, generation, phases, sampling, base)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum))
}
_ERRORS: dict[str, type[errors.PalaverError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PalaverError)
}


def pack(value: Any) -> Any:
    """As JSON can hold it. Lists come back as tuples."""
    if type(value) is generation.Step and value.drawn_logprob is None:  # nearly all that crosses, so it is short
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
        return list(value) if _plain(value) else [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value) if _plain(value) else tuple(unpack(item) for item in value)
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


def _plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether these are numbers alone, as token ids are, and there may be many."""
    return all(type(value) is int for value in values)


def pack_error(error: errors.PalaverError) -> dict[str, Any]:
    extra = {name: item for name, item in vars(error).items() if isinstance(item, str | int | float | bool | None)}
    return {"error": type(error).__name__, "says": str(error), "with": extra}


def unpack_error(value: dict[str, Any]) -> errors.PalaverError:
    """An error of the same type that says the same, whatever its constructor takes."""
    kind = _ERRORS.get(value["error"], errors.EngineError)
    error = kind.__new__(kind)
    Exception.__init__(error, value["says"])
    error.__dict__.update(value["with"])
    return error


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next frame; None where the other side is gone."""
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


_ALMOST = 0.99


class LoadProgress:
    def __init__(self) -> None:
        self.note = "starting"
        self._before: int | None = None
        self._whole = 0

    def begin(self, folder: Path) -> None:
        """From here on the weights are read."""
        self.note = "loading the weights"
        self._whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._before = _resident()

    @property
    def share(self) -> float | None:
        """From 0 to 1; None where it isn't known, as on systems that don't tell a process its memory."""
        now = _resident()
        if self._before is None or now is None or not self._whole:
            return None
        return min(_ALMOST, max(0.0, (now - self._before) / self._whole))


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
