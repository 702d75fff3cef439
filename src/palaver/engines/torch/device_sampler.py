"""Sampling where torch has the logits: a whole batch on CUDA, and one small row of results is copied to the host.

The rules are those of `core/sampler.py`. Logits on the CPU are given to that sampler without a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.generation import PendingStep
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.sampler import (
    SAMPLER_VERSION,
    HostLogits,
    Logits,
    NextPass,
    SampledStep,
    SampledToken,
    make_alternatives,
    make_step,
)
from palaver.engines.torch import device_filters
from palaver.engines.torch.cuda_graphs import Capture
from palaver.engines.torch.device_changes import DeviceChanges, TooManyEdits
from palaver.errors import PalaverError
from palaver.generation import Step

if TYPE_CHECKING:  # it needs Triton
    from palaver.engines.torch.kernel_sampler import KernelSampler

Array: TypeAlias = NDArray[np.float64]

DEVICE_SAMPLER_VERSION = 4
"""Raised when the same logits, settings and seed may give another token on CUDA than before."""


def sampler_version(device: torch.device) -> int:
    return DEVICE_SAMPLER_VERSION if device.type == "cuda" else SAMPLER_VERSION


class DeviceSampler:
    """Samples the logits of one runner. Holds what replies need on its device from one token to the next."""

    def __init__(
        self, device: torch.device, on_device: bool | None = None, slots: int = 4, capture: Capture | None = None
    ) -> None:
        """`on_device`: whether logits stay on the device; None: on CUDA. `slots`, `capture`: as in KernelSampler."""
        self._on_device = device.type == "cuda" if on_device is None else on_device
        self.changes = DeviceChanges(device)
        self.kernels = make_kernel_sampler(device, slots, capture)
        """None where Triton is not installed: torch's operations sample then."""

    def logits(self, tensor: Tensor) -> Logits:
        """The rows of a tensor: they stay on the device, or they are numpy's."""
        if self._on_device:
            return DeviceLogits(tensor, self)
        return HostLogits(tensor.detach().float().cpu().numpy())

    def sample(self, logits: Tensor, processors: Sequence[LogitsProcessor], undecided: bool = False) -> Tensor:
        """A row of results for each row of float32 logits: see `device_filters`. `undecided`: as in KernelSampler."""
        if self.kernels is not None:
            try:
                return self.kernels.sample(logits, processors, undecided)
            except TooManyEdits:
                pass
        scores = self.changes.apply(logits, [one.changes() if one.is_active else None for one in processors])
        return device_filters.sample_rows(logits, scores, processors, device_filters.REPORTED)


class DeviceLogits:
    """Logits in the memory of a CUDA device."""

    def __init__(self, tensor: Tensor, sampler: DeviceSampler) -> None:
        self.tensor = tensor
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self.tensor)

    def row(self, index: int) -> DeviceLogits:
        return DeviceLogits(self.tensor[index : index + 1], self._sampler)

    def select(self, rows: Sequence[int]) -> DeviceLogits:
        return DeviceLogits(self.tensor[list(rows)], self._sampler)

    def joined(self, others: Sequence[Logits]) -> DeviceLogits:
        tensors = [other.tensor for other in others if isinstance(other, DeviceLogits)]
        assert len(tensors) == len(others), "logits of one runner are of one kind"
        return DeviceLogits(torch.cat([self.tensor, *tensors]), self._sampler)

    def copy(self) -> DeviceLogits:
        return DeviceLogits(self.tensor.clone(), self._sampler)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def sample_ahead(self, row: int, count: int, processor: LogitsProcessor) -> Sequence[SampledStep | None]:
        return ()

    def sample(self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None) -> list[SampledStep]:
        if next_pass is not None and self.tensor.dtype == torch.float32:
            self.tensor = self.tensor.clone()  # the next pass may overwrite it while this one is read
        self.tensor = self.tensor.float().contiguous()
        results = self._sampler.sample(self.tensor, processors)
        table = start_copy(results)
        if next_pass is not None:
            next_pass.start(results[:, device_filters.TOKEN].long())
        return steps_from_results(table(), self.tensor.__getitem__, processors, self._sampler, next_pass)


def make_kernel_sampler(device: torch.device, slots: int, capture: Capture | None) -> KernelSampler | None:
    """None where Triton is not installed, and on other devices than CUDA's."""
    if device.type != "cuda":
        return None
    try:
        from palaver.engines.torch.kernel_sampler import KernelSampler
    except ImportError:
        return None
    return KernelSampler(device, slots, capture)


def steps_from_results(
    table: Array,
    logits: Callable[[list[int]], Tensor],
    processors: Sequence[LogitsProcessor],
    sampler: DeviceSampler,
    next_pass: NextPass | None,
) -> list[SampledStep]:
    """The steps of a batch, after the rows that are undecided are sampled again, from their `logits`. `next_pass` runs
    already with the tokens of the table: the rows that get another one are dropped from it."""
    left = np.flatnonzero(table[:, device_filters.STATUS] == device_filters.UNDECIDED).tolist()
    if left:
        own = [processors[row] for row in left]
        for row, processor in zip(left, own, strict=True):
            if next_pass is not None:
                next_pass.drop(row)
            if sampler.kernels is not None:
                sampler.kernels.note_undecided(processor)
        table = table.copy()
        table[left] = sampler.sample(logits(left), own, undecided=True).cpu().numpy()
    steps = _read_results(table, processors)
    if next_pass is not None:
        _drop_failed(steps, next_pass)
    return steps


def _drop_failed(steps: Sequence[SampledStep], next_pass: NextPass) -> None:
    for row, step in enumerate(steps):
        if isinstance(step, PalaverError):
            next_pass.drop(row)


def start_copy(results: Tensor) -> Callable[[], Array]:
    """Starts the copy to the host; the function that is returned waits for it, and for nothing that starts later."""
    if results.device.type != "cuda":
        return results.numpy
    table = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    table.copy_(results, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Array:
        copied.synchronize()
        return table.numpy()

    return wait


def _read_results(table: Array, processors: Sequence[LogitsProcessor]) -> list[SampledStep]:
    """All but the tokens is left to the readers of the replies."""
    batch = _BatchResults(table, processors)
    failed = np.isnan(table[:, device_filters.LOGPROB]) | (table[:, device_filters.STATUS] == device_filters.NONE_LEFT)
    token_ids = np.where(failed, 0, table[:, device_filters.TOKEN]).astype(np.int64).tolist()
    steps: list[SampledStep] = [PendingStep(token_id, batch, row) for row, token_id in enumerate(token_ids)]
    for row in np.flatnonzero(failed).tolist():
        logprob, status = table[row, [device_filters.LOGPROB, device_filters.STATUS]].tolist()
        score = -math.inf if status == device_filters.NONE_LEFT else 0.0
        steps[row] = make_step(SampledToken(int(table[row, device_filters.TOKEN]), logprob, score), processors[row])
    return steps


class _BatchResults:
    """The results of a batch, as the kernels wrote them. Whole columns become lists at once, when the first reader asks
    for its step."""

    def __init__(self, table: Array, processors: Sequence[LogitsProcessor]) -> None:
        self.table = table
        self._wanted = [processor.sampling.logprobs for processor in processors]

    def read_step(self, row: int) -> Step:
        (token_ids, logprobs, drawn_logprobs), lists = self._columns
        wanted = self._wanted[row]
        if not wanted:
            return Step(int(token_ids[row]), logprobs[row])
        raw_ids, raw_logprobs, own_ids, own_logprobs = (column[row][:wanted] for column in lists)
        alternatives, drawn_from = make_alternatives(raw_ids, raw_logprobs), make_alternatives(own_ids, own_logprobs)
        return Step(int(token_ids[row]), logprobs[row], alternatives, drawn_logprobs[row], drawn_from)

    @cached_property
    def _columns(self) -> tuple[list[list[float]], tuple[list[list[Any]], ...]]:
        """Tokens, log-probabilities before and after all options; then ids and log-probabilities of the likeliest."""
        count = max(self._wanted)
        starts = range(device_filters.LISTS, device_filters.WIDTH - 1, device_filters.REPORTED)
        lists = [self.table[:, start : start + count] for start in starts]
        lists[::2] = [ids.astype(np.int64) for ids in lists[::2]]
        columns = [device_filters.TOKEN, device_filters.LOGPROB, device_filters.DRAWN_LOGPROB]
        return self.table[:, columns].T.tolist(), tuple(column.tolist() for column in lists)
