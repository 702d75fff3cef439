"""Sampling where torch has the logits: a whole batch on CUDA, and one small row of results is copied to the host.

The rules are those of `core/sampler.py`. Logits on the CPU are given to that sampler without a copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from types import ModuleType
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.generation import PendingStep
from palaver.engines.core.processor import LogitsProcessor
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
    left = [
        row
        for row, processor in enumerate(processors)
        if table[row, device_filters.STATUS] == device_filters.UNDECIDED
        or not is_decided_by_kernel(processor, kernels.MAX_TOP_K)
    ]
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
    sampling = processor.sampling
    rare = sampling.typical_p < 1 or sampling.top_a > 0 or sampling.dynatemp_range > 0 or sampling.xtc_probability > 0
    return not processor.do_sample or (sampling.top_k <= max_top_k and not rare)


def _kernel_settings(processor: LogitsProcessor, max_top_k: int) -> tuple[float, ...]:
    sampling, forced = processor.sampling, processor.reply.forced_id
    if not processor.do_sample:
        return (0, 0, 1, 0, 0, -1 if forced is None else forced)
    top_k = min(sampling.top_k, max_top_k)
    return (1 / sampling.temperature, top_k, sampling.top_p, sampling.min_p, processor.uniform(), -1)


def _read_results(table: Array, processors: Sequence[LogitsProcessor]) -> list[SampledStep]:
    """Alternatives are left to the readers of the replies."""
    batch = _BatchResults(table, processors)
    columns = table[:, [device_filters.TOKEN, device_filters.LOGPROB, device_filters.STATUS]].tolist()
    steps: list[SampledStep] = []
    for row, ((token_id, logprob, status), processor) in enumerate(zip(columns, processors, strict=True)):
        score = -math.inf if status == device_filters.NONE_LEFT else 0.0
        step = make_step(SampledToken(int(token_id), logprob, score), processor)
        if isinstance(step, Step) and processor.sampling.logprobs:
            steps.append(PendingStep(step.token_id, partial(batch.add_alternatives, step, row)))
        else:
            steps.append(step)
    return steps


class _BatchResults:
    """The results of a batch, as the kernels wrote them. Whole columns become lists at once, when the first reader asks
    for its alternatives."""

    def __init__(self, table: Array, processors: Sequence[LogitsProcessor]) -> None:
        self.table = table
        self._wanted = [processor.sampling.logprobs for processor in processors]

    def add_alternatives(self, step: Step, row: int) -> Step:
        drawn_logprobs, raw_ids, raw_logprobs, own_ids, own_logprobs = self._columns
        wanted = self._wanted[row]
        alternatives = make_alternatives(raw_ids[row][:wanted], raw_logprobs[row][:wanted])
        drawn_from = make_alternatives(own_ids[row][:wanted], own_logprobs[row][:wanted])
        return Step(step.token_id, step.logprob, alternatives, drawn_logprobs[row], drawn_from)

    @cached_property
    def _columns(
        self,
    ) -> tuple[list[float], list[list[int]], list[list[float]], list[list[int]], list[list[float]]]:
        count = max(self._wanted)
        starts = range(device_filters.LISTS, device_filters.WIDTH, device_filters.REPORTED)
        raw_ids, raw_logprobs, own_ids, own_logprobs = (self.table[:, start : start + count] for start in starts)
        return (
            self.table[:, device_filters.DRAWN_LOGPROB].tolist(),
            raw_ids.astype(np.int64).tolist(),
            raw_logprobs.tolist(),
            own_ids.astype(np.int64).tolist(),
            own_logprobs.tolist(),
        )
