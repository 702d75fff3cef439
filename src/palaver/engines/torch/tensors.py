"""The KV cache in torch's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palaver.engines.core.kv_cache import KVLayout


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised this for lack of memory, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
