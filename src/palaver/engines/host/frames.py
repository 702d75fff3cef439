"""The protocol between supervisor and engine process: length-prefixed JSON frames, generated from their types. The data
of media follows the JSON as it is."""

from __future__ import annotations

import asyncio
import os
import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter
from typing_extensions import TypedDict

from palaver.encoding import Tagged, decode_error, error_details, error_name
from palaver.engines.base import EngineInfo
from palaver.errors import EngineError, PalaverError
from palaver.generation import (
    AnswerRequested,
    Draft,
    Ended,
    MediaContent,
    MediaExpansion,
    MediaItem,
    Prefilled,
    Prompt,
    Queued,
    Step,
)
from palaver.gguf import split_files
from palaver.sampling import Sampling

_LENGTHS = struct.Struct("!II")
"""Of the JSON, and of the data after it."""
MAX_FRAME = 512 * 1024 * 1024


class ErrorFrame(TypedDict):
    """A PalaverError."""

    type: Literal["error"]
    name: str
    message: str
    details: dict[str, Any]


AnyPath = Annotated[
    Path,
    PlainSerializer(lambda path: os.fsencode(path).hex()),
    PlainValidator(lambda value: value if isinstance(value, Path) else Path(os.fsdecode(bytes.fromhex(value)))),
]
"""A path, which need not be UTF-8."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How a process loads an engine."""

    engine: str
    """torch, compiled, llamacpp, mlx, diffusion, vllm, remote or ray."""
    model: AnyPath
    vocabulary: tuple[bytes, ...]
    adapter: AnyPath | None = None
    mmproj: AnyPath | None = None
    draft_model: AnyPath | None = None
    drafts: bool | None = None
    device: str | None = None
    dtype: str | None = None
    quantize_bits: int | None = None
    exact: bool = False
    context: int | None = None
    compiled: bool | None = None
    cache_bytes: int | None = None
    max_running: int | None = None
    gpu_layers: int | None = None
    threads: int | None = None
    states: AnyPath | None = None
    approximate_cache: bool = False
    diffusion: dict[str, Any] | None = None
    """The diffusion settings of a training configuration, instead of the model's own."""
    python: AnyPath | None = None
    """The Python of the user's environment in which the process runs. None: Palaver's own."""
    native_sampling: bool = False
    """Whether vLLM's own sampler chooses the tokens."""
    address: str | None = None
    """Of a server elsewhere, such as vllm+https://host, or of an application on a cluster: ray://auto/sprout."""
    key: str | None = None
    """The key of that server."""


OutputFrame = Annotated[Queued | Prefilled | Step | Draft | AnswerRequested | Ended | ErrorFrame, Tagged]


class Frame(TypedDict, total=False):
    """One frame. Commands to the process have `do`; its answers have one of the fields from `loading` on."""

    do: Literal["load", "generate", "cancel", "stop", "answer_now", "expand", "content", "figures", "forget", "close"]
    number: int
    spec: EngineSpec
    prompt: Prompt
    sampling: Sampling
    choice: int
    conversation: str
    item: MediaItem
    """A picture or a sound to expand."""
    key: str
    """The key of the item that `content` belongs to. Without `content` it could not be loaded: see `error`."""
    content: MediaContent
    """Its data follows the frame."""
    error: ErrorFrame

    loading: tuple[float | None, str]
    failed: ErrorFrame
    ready: EngineInfo
    request: int
    progress: str
    outputs: list[tuple[int, OutputFrame]]
    """The outputs of one step, with the numbers of their requests."""
    answer: dict[str, float]
    wants: str
    """The key of an item whose content the request or expansion `number` needs."""
    expansion: MediaExpansion
    log: tuple[int, str, str]
    """A line of the process's log: level, name of the logger, message."""
    refused: ErrorFrame
    """Why the item of the expansion `number` is not taken."""


@cache
def _adapter() -> TypeAdapter[Any]:
    config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
    return TypeAdapter(Frame | None, config=config)  # a TypedDict by itself takes no configuration


def encode_error(error: PalaverError) -> ErrorFrame:
    return {
        "type": "error",
        "name": error_name(type(error)),
        "message": str(error),
        "details": error_details(error),
    }


def decode_error_frame(frame: ErrorFrame) -> PalaverError:
    error = decode_error(frame["name"], frame["message"], frame["details"])
    return EngineError(frame["message"]) if error is None else error


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None if the connection is closed."""
    try:
        size, data_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        assert max(size, data_size) <= MAX_FRAME
        encoded = await reader.readexactly(size)
        data = await reader.readexactly(data_size) if data_size else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    frame = decode_frame(encoded)
    if data:
        frame["content"] = replace(frame["content"], data=data)
    return frame


def decode_frame(data: bytes) -> Frame:
    frame: Frame = _adapter().validate_json(data)
    return frame


def decode_frames(data: bytes) -> list[Frame]:
    """Frames one after another, as `encode_frame` writes each."""
    frames, start = [], 0
    while start < len(data):
        size, data_size = _LENGTHS.unpack_from(data, start)
        start += _LENGTHS.size
        frame = decode_frame(data[start : start + size])
        if data_size:
            frame["content"] = replace(frame["content"], data=data[start + size : start + size + data_size])
        frames.append(frame)
        start += size + data_size
    return frames


def encode_frame(frame: Frame) -> bytes:
    """Raises ValueError for a text that UTF-8 can't encode (a lone surrogate)."""
    data = b""
    if "content" in frame:
        data = frame["content"].data
        frame = {**frame, "content": replace(frame["content"], data=b"")}
    encoded = _adapter().dump_json(frame)
    return _LENGTHS.pack(len(encoded), len(data)) + encoded + data


_MAX_FRACTION = 0.99


class LoadProgress:
    """How far the loading of a model is."""

    def __init__(self) -> None:
        self.note = "starting"
        self.loaded: float | None = None
        """The fraction that the engine itself reports."""
        self._start_bytes: int | None = None
        self._total_bytes = 0

    def begin(self, model: Path) -> None:
        """Call before the weights are read: those of a folder, or of a GGUF file."""
        self.note = "loading the weights"
        files = split_files(model) if model.is_file() else model.glob("*.safetensors")
        self._total_bytes = sum(path.stat().st_size for path in files)
        self._start_bytes = _resident_bytes()

    @property
    def fraction(self) -> float | None:
        """From 0 to 1, reported or estimated from this process's memory; None if that is unknown."""
        if self.loaded is not None:
            return min(_MAX_FRACTION, self.loaded)
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
