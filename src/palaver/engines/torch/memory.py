"""Memory and threads: whether a model fits, how much the KV cache may take, how many threads a pass uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from palaver.engines.core.checkpoint import Checkpoint
from palaver.engines.core.options import Fit, default_cache_bytes
from palaver.engines.core.runner import ThreadCounts
from palaver.engines.torch.quantization import VALUES_PER_BYTE, is_dequantized, quantization_method
from palaver.memory import available_bytes

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CPU = torch.device("cpu")


def fit(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> Fit:
    weights = weights_bytes(checkpoint, dtype, device)
    if compiled and device.type == "cpu":
        weights += sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return Fit.of(weights, free_bytes(device), str(device))


def check_fit(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> None:
    """Raises DoesNotFit, before anything is loaded. Compiled steps hold a second copy of the weights, as stored."""
    fit(checkpoint, device, dtype, compiled).check(checkpoint.name)


def weights_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = CPU) -> int:
    """The memory of the loaded weights: floats are converted to the dtype, unless the checkpoint stays quantised."""
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
