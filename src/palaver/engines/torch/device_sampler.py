"""Sampling where torch has the logits: a whole batch on CUDA, and one small row of results is copied to the host.

The rules are those of `core/sampler.py`. Logits on the CPU are given to that sampler without a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import Any, TypeAlias

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
from palaver.engines.torch.device_changes import DeviceChanges, to_device
from palaver.errors import PalaverError
from palaver.generation import Step

Array: TypeAlias = NDArray[np.float64]

DEVICE_SAMPLER_VERSION = 3
"""Raised when the same logits, settings and seed may give another token on CUDA than before."""


def sampler_version(device: torch.device) -> int:
    return DEVICE_SAMPLER_VERSION if device.type == "cuda" else SAMPLER_VERSION


class DeviceSampler:
    """Samples the logits of one runner. Holds what replies need on its device from one token to the next."""

    def __init__(self, device: torch.device, on_device: bool | None = None) -> None:
        """`on_device`: whether logits stay on the device; None: on CUDA."""
        self._on_device = device.type == "cuda" if on_device is None else on_device
        self.changes = DeviceChanges(device)

    def logits(self, tensor: Tensor) -> Logits:
        """The rows of a tensor: they stay on the device, or they are numpy's."""
        if self._on_device:
            return DeviceLogits(tensor, self)
        return HostLogits(tensor.detach().float().cpu().numpy())


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

    def sample(self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None) -> list[SampledStep]:
        if next_pass is not None and self.tensor.dtype == torch.float32:
            self.tensor = self.tensor.clone()  # the next pass may overwrite it while this one is read
        self.tensor = self.tensor.float()
        return sample_on_device(self.tensor, processors, self._sampler.changes, load_kernels(), next_pass)


@cache
def load_kernels() -> ModuleType | None:
    """None where Triton isn't installed."""
    try:
        from palaver.engines.torch import sampling_kernels
    except ImportError:
        return None
    return sampling_kernels


def sample_on_device(
    logits: Tensor,
    processors: Sequence[LogitsProcessor],
    changes: DeviceChanges,
    kernels: ModuleType | None,
    next_pass: NextPass | None = None,
) -> list[SampledStep]:
    """With the kernels of `sampling_kernels`, or with torch's operations where there are none."""
    scores = changes.apply(logits, [processor.changes() if processor.is_active else None for processor in processors])
    if kernels is None:
        results = device_filters.sample_rows(logits, scores, processors, device_filters.REPORTED)
        table = start_copy(results)
        if next_pass is not None:
            next_pass.start(results[:, device_filters.TOKEN].long())
        steps = _read_results(table(), processors)
        if next_pass is not None:
            _drop_failed(steps, next_pass)
        return steps
    settings = np.array([_kernel_settings(processor, kernels.MAX_TOP_K) for processor in processors], dtype=np.float64)
    results = kernels.sample_rows(logits, scores, to_device(settings, logits.device))
    table = start_copy(results)
    if next_pass is not None and all(is_decided_by_kernel(processor, kernels.MAX_TOP_K) for processor in processors):
        next_pass.start(results[:, device_filters.TOKEN].long())
    else:
        next_pass = None
    return steps_from_results(table(), logits, scores, processors, kernels, next_pass)


def steps_from_results(
    table: Array,
    logits: Tensor,
    scores: Tensor,
    processors: Sequence[LogitsProcessor],
    kernels: ModuleType,
    next_pass: NextPass | None,
) -> list[SampledStep]:
    """What the kernels decided, and the rest by torch's operations. `next_pass` runs already with the kernels' tokens:
    the rows that get another one are dropped from it."""
    undecided = np.flatnonzero(table[:, device_filters.STATUS] == device_filters.UNDECIDED).tolist()
    others = [row for row, own in enumerate(processors) if not is_decided_by_kernel(own, kernels.MAX_TOP_K)]
    left = sorted({*undecided, *others})
    if left:
        if next_pass is not None:
            for row in left:
                next_pass.drop(row)
        own = [processors[row] for row in left]
        rest = device_filters.sample_rows(logits[left], scores[left], own, device_filters.REPORTED)
        table = table.copy()
        table[left] = rest.cpu().numpy()
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


def is_decided_by_kernel(processor: LogitsProcessor, max_top_k: int) -> bool:
    """The kernels know temperature, top_k up to a limit, top_p and min_p."""
    free = not processor.has_rare_filters and processor.sampling.top_k <= max_top_k
    return free or not processor.do_sample


def _kernel_settings(processor: LogitsProcessor, max_top_k: int) -> tuple[float, ...]:
    sampling, forced = processor.sampling, processor.reply.forced_id
    if not processor.do_sample:
        return (0, 0, 1, 0, 0, -1 if forced is None else forced)
    top_k = min(sampling.top_k, max_top_k)
    return (1 / sampling.temperature, top_k, sampling.top_p, sampling.min_p, processor.uniform(), -1)


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
        starts = range(device_filters.LISTS, device_filters.WIDTH, device_filters.REPORTED)
        lists = [self.table[:, start : start + count] for start in starts]
        lists[::2] = [ids.astype(np.int64) for ids in lists[::2]]
        columns = [device_filters.TOKEN, device_filters.LOGPROB, device_filters.DRAWN_LOGPROB]
        return self.table[:, columns].T.tolist(), tuple(column.tolist() for column in lists)
