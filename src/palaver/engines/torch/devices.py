"""The device of a model: its dtype, memory and threads, and the KV cache in its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.kv_cache import KVLayout
from palaver.engines.core.options import Fit, default_cache_bytes
from palaver.engines.core.quantization_config import Quantization
from palaver.engines.core.runner import ThreadCounts
from palaver.engines.torch.weight_memory import WeightMemory
from palaver.errors import BadParameter
from palaver.memory import available_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str | None) -> torch.device:
    """The named device, or the best there is."""
    if name is not None:
        return _named_device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadParameter("device", name, "there is no such device here; try cpu") from error
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """float32 on the CPU, where it is exact and no slower; else bfloat16, or float16 where that is missing."""
    if name is not None:
        if name not in DTYPES:
            raise BadParameter("dtype", name, f"must be one of {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


VALUES_PER_BYTE = {"fp8": 1, "mxfp8": 1, "mxfp4": 2}
"""Quantisation methods whose weights are dequantised without CUDA, and how many values a byte holds."""


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantisation settings of a model's configuration; None where its weights are plain."""
    found = config.get("quantization_config")
    return dict(found) if isinstance(found, Mapping) else None


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The transformers library's name of the method."""
    found = quantization_config(config)
    return None if found is None else str(found.get("quant_method", "unknown"))


def is_dequantized(config: Mapping[str, Any], device: torch.device) -> bool:
    """Whether quantised weights become floats when loaded, which take more memory than their files."""
    return quantization_method(config) in VALUES_PER_BYTE and device.type != "cuda"


DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CPU = torch.device("cpu")


def fit(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
    quantization: Quantization | None = None,
) -> Fit:
    """`quantization`: of a plain decoder."""
    weights = weights_bytes(checkpoint, dtype, device, quantization)
    if compiled and device.type == "cpu":
        stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        weights += stored if quantization is None else weights
    return Fit.of(weights, free_bytes(device), str(device))


def check_fit(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool = False,
    quantization: Quantization | None = None,
) -> None:
    """Raises DoesNotFit, before anything is loaded. Compiled steps hold a second copy of the weights, as stored."""
    fit(checkpoint, device, dtype, compiled, quantization).check(checkpoint.name)


def weights_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device = CPU,
    quantization: Quantization | None = None,
) -> int:
    """The memory of the loaded weights: floats are converted to the dtype, unless the checkpoint stays quantised."""
    if quantization is not None:
        return WeightMemory.of(checkpoint, quantization, dtype).held(device, dtype, free_bytes(device))
    method = quantization_method(checkpoint.config)
    dequantized = is_dequantized(checkpoint.config, device)
    total = 0
    for tensor in checkpoint.tensors.values():
        kind, elements = tensor.dtype, tensor.elements
        if dequantized and kind not in DTYPE_BYTES:
            total += elements * VALUES_PER_BYTE[str(method)] * dtype.itemsize
        else:
            converted = kind in FLOAT_DTYPES and (method is None or dequantized)
            total += elements * (dtype.itemsize if converted else DTYPE_BYTES.get(kind, 1))
    return total


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def cache_bytes(device: torch.device) -> int:
    """The default bound on the KV cache of a loaded model."""
    return default_cache_bytes(device.type, free_bytes(device))


class TorchThreads(ThreadCounts):
    """Sets torch's intra-op thread counts."""

    def apply(self) -> None:
        """Sets the intra-op thread count of the calling thread to that of small passes."""
        torch.set_num_threads(self.small_pass)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The thread count of the engine's thread, for a while."""
        before = torch.get_num_threads()
        self.apply()
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def scaled_for(self, pairs: int) -> Iterator[None]:
        """The thread count for a pass with so many pairs of a query and a key."""
        count = self.for_pairs(pairs)
        if count == self.small_pass:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            self.apply()


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Tensors of one dtype on one device."""

    dtype: torch.dtype
    device: torch.device

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    def reserve(self, nbytes: int) -> None:
        if self.device.type == "cuda":
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)  # torch keeps what is freed, and divides it

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def clone(self, array: Tensor) -> Tensor:
        return array.clone(memory_format=torch.contiguous_format)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def to_host(self, array: Tensor) -> Tensor:
        return array.to("cpu", copy=True)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)


@dataclass(frozen=True, slots=True)
class TensorLayout(KVLayout[Tensor]):
    """The layout of a cache in tensors."""

    memory: TensorMemory

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        return self.memory.device


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "MPS backend out of memory")
"""In the messages of plain RuntimeErrors, which the CPU and Apple GPUs raise."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised this for lack of memory, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
