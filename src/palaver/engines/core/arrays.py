"""The arrays of the KV cache: numpy's in the host's memory, or a framework's on its device."""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

HostArray = NDArray[np.float32]
ALIGNMENT = 64
"""The bytes of a cache line, and of the widest vectors."""


class Array(Protocol):
    """What the cache uses of numpy's arrays and of torch's tensors."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    @property
    def reshape(self) -> Any: ...


A = TypeVar("A", bound=Array)


class ArrayMemory(Protocol[A]):
    """Allocates and copies arrays of one element type in one memory."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether it is the memory of the CPU, where moving arrays costs as much as using them."""
        ...

    def zeros(self, shape: tuple[int, ...]) -> A: ...

    def clone(self, array: A) -> A:
        """A contiguous copy."""
        ...

    def copy(self, target: A, source: A) -> None: ...

    def to_host(self, array: A) -> A:
        """A copy in the host's memory."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool: ...


class HostMemory:
    """float32 arrays of numpy."""

    itemsize = 4
    on_host = True

    def zeros(self, shape: tuple[int, ...]) -> HostArray:
        return aligned_zeros(shape, np.float32)

    def clone(self, array: HostArray) -> HostArray:
        return np.array(array, order="C")

    def copy(self, target: HostArray, source: HostArray) -> None:
        target[...] = source

    def to_host(self, array: HostArray) -> HostArray:
        return self.clone(array)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array that begins at a cache line: vectors that cross lines are slower to load."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
