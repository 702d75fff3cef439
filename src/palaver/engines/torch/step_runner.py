"""The runner of plain decoders on CUDA: decodes by `DecoderStep`, which samples, too. Prompts are computed by the same
kernels in the exact mode; otherwise long ones by torch's operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.base import BY_BATCH, BY_TEXT
from palaver.engines.core.kv_cache import Slot, SlotAllocator
from palaver.engines.core.processor import LogitsProcessor
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.core.sampler import Logits, NextPass, SampledStep
from palaver.engines.torch import sampling_kernels
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.cuda_graphs import CudaGraphCapture
from palaver.engines.torch.cuda_step import DecoderStep, StepRow
from palaver.engines.torch.device_sampler import (
    DeviceLogits,
    DeviceSampler,
    is_decided_by_kernel,
    start_copy,
    steps_from_results,
)
from palaver.engines.torch.devices import TensorLayout, TorchThreads
from palaver.engines.torch.model_runner import Forward, TorchRunner
from palaver.engines.torch.plain_decoder import PlainDecoder
from palaver.sampling import Sampling

PROBE_TOKENS = 150
"""Tokens of the text that a step is probed with: more than two tiles of attention."""
PROBE_BYTES = 1 << 24
MAX_ERROR = 0.1
"""By how much the logits of two ways to compute them may differ, relative to their size. Rounding in bfloat16 comes to
a few hundredths in deep models, and a wrong kernel to more than 1."""
SHORT_PROMPT = 1024
"""Tokens of prompts in a pass up to which the kernels are quicker than torch's operations."""
GREEDY = Sampling(temperature=0)


class SampledLogits(DeviceLogits):
    """The logits of a step that has sampled, by the settings of the replies alone. Where a reply now wants something
    else, such as a mask, its row is sampled again."""

    def __init__(
        self,
        tensor: Tensor,
        sampler: DeviceSampler,
        step: DecoderStep,
        results: Callable[[], NDArray[np.float64]],
        rows: Sequence[int] | None = None,
    ) -> None:
        """`rows`: of the results; None: all of them in order."""
        super().__init__(tensor, sampler)
        self._step = step
        self._results = results
        self._rows = rows

    def select(self, rows: Sequence[int]) -> SampledLogits:
        mine = list(rows) if self._rows is None else [self._rows[row] for row in rows]
        return SampledLogits(self.tensor[list(rows)], self._sampler, self._step, self._results, mine)

    def sample(self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None) -> list[SampledStep]:
        if not all(map(_is_plain, processors)):
            return super().sample(processors, next_pass)
        logits = self.tensor
        if next_pass is not None:
            if any(processor.do_sample for processor in processors):
                logits = logits.clone()  # for what the kernels leave undecided: the next pass overwrites it
            next_pass.start(self._step.tokens if self._rows is None else self._step.tokens[list(self._rows)])
        table = self._results()
        table = table if self._rows is None else table[list(self._rows)]
        return steps_from_results(table, logits, logits, processors, sampling_kernels, next_pass)


def _is_plain(processor: LogitsProcessor) -> bool:
    """Whether the next token follows from the logits and the settings that a step knows."""
    free = not processor.is_active and processor.reply.forced_id is None
    return free and is_decided_by_kernel(processor, sampling_kernels.MAX_TOP_K)


class StepRunner(TorchRunner):
    def __init__(
        self,
        step: DecoderStep,
        forward: Forward,
        layout: TensorLayout,
        cache_bytes: int,
        context_length: int,
        threads: TorchThreads,
        run_ahead: bool | None = None,
        **options: Any,
    ) -> None:
        """`forward` computes what the step doesn't: long prompts, unless the step is exact, and media."""
        super().__init__(forward, layout, cache_bytes, context_length, threads, run_ahead=run_ahead, **options)
        self._step = step
        self._cache.widens_pools = False  # a step attends for slots wherever they are

    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> Logits:
        with_media = any(map(self._has_media_ahead, sequences))
        if need_logits and not with_media and max(counts) == 1:
            return self._run_step(sequences, [self._next_chunk(sequence, 1) for sequence in sequences])
        if not need_logits and not with_media and (self._step.exact or sum(counts) <= SHORT_PROMPT):
            chunks = [self._next_chunk(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
            began = time.thread_time()
            self._step.prefill(chunks)
            self.forward_seconds += time.thread_time() - began
            return self._sampler.logits(torch.empty(0, 0, device=self._device))
        return super()._compute(sequences, counts, need_logits)

    def _run_ahead(self, sequences: Sequence[SequenceState], tokens: object) -> Logits | None:
        if len(sequences) > self._step.max_rows or any(map(self._has_media_ahead, sequences)):
            return None
        assert isinstance(tokens, Tensor)
        self._grow_slots(sequences, [1] * len(sequences))
        logits = self._run_step(sequences, [self._chunk_ahead(sequence) for sequence in sequences], tokens)
        for sequence in sequences:
            sequence.computed_tokens += 1
        return logits

    def _has_media_ahead(self, sequence: SequenceState) -> bool:
        media = self._media.get(sequence)
        return media is not None and sequence.computed_tokens < media.end

    def _run_step(
        self, sequences: Sequence[SequenceState], chunks: Sequence[SequenceChunk], tokens: Tensor | None = None
    ) -> Logits:
        began = time.thread_time()
        rows = [
            StepRow(
                chunk,
                sequence.processor.sampling,
                sequence.processor.uniform_state,
                len(sequence.generation.prompt.context_ids),
            )
            for sequence, chunk in zip(sequences, chunks, strict=True)
        ]
        logits, results = self._step.run(rows, tokens)
        copied = start_copy(results)
        self.forward_seconds += time.thread_time() - began
        return SampledLogits(logits, self._sampler, self._step, copied)


def build_step(
    parts: PlainDecoder, layout: TensorLayout, decoder: Forward, max_rows: int, exact: bool, ids: Sequence[int]
) -> tuple[DecoderStep, str]:
    """The step of a model, and what the bits of a reply depend on with it. Raises UnsupportedModel for models and
    devices that the kernels don't know, and where they don't give the decoder's logits."""
    if layout.device.type != "cuda" or layout.dtype != torch.bfloat16:
        raise UnsupportedModel("the kernels are for bfloat16 on CUDA")
    newest = torch.cuda.get_device_capability(layout.device) >= (9, 0)
    step = DecoderStep(parts, exact, CudaGraphCapture(layout.device), max_rows, pdl=newest)
    text = [ids[i % len(ids)] for i in range(PROBE_TOKENS)]
    probe = StepProbe(step, layout, text)
    probe.compare(decoder)
    step.capture_all()
    return step, BY_TEXT if exact and probe.depends_on_text_alone() else BY_BATCH


class StepProbe:
    """Compares the logits after one text with those of a decoder, and with those of the same text in other passes."""

    def __init__(self, step: DecoderStep, layout: TensorLayout, ids: Sequence[int]) -> None:
        self._step = step
        self._layout = layout
        self._slots = SlotAllocator(layout, PROBE_BYTES)
        self._ids = ids

    def compare(self, decoder: Callable[[ForwardBatch], Tensor]) -> None:
        """Raises unless a step after a prompt of the decoder's gives the decoder's logits, up to rounding."""
        last = len(self._ids) - 1
        slot, other = (self._slots.allocate(len(self._ids) + 1) for _ in range(2))
        for one in (slot, other):
            decoder(build_batch([sequence_chunk(one, 0, self._ids[:last])], self._layout.device, need_logits=False))
        whole = sequence_chunk(other, last, self._ids[last:])
        expected = decoder(build_batch([whole], self._layout.device))[0].float()
        found = self._decode([(slot, last)])[0]
        if not float((found - expected).norm()) <= MAX_ERROR * float(expected.norm()):
            raise UnsupportedModel("the kernels' logits differ from the decoder's")

    def depends_on_text_alone(self) -> bool:
        """Whether the bits are the same in one chunk and in several, with tokens decoded one by one, and beside other
        sequences."""
        last = len(self._ids) - 1
        alone = self._decode([(self._prefill([last]), last)])[0].clone()
        in_chunks = self._prefill([7, last - 9, 1, 1])
        others = [(self._prefill([3]), 3), (self._prefill([20]), 20)]
        beside = self._decode([others[0], (in_chunks, last), others[1]])[1]
        return torch.equal(alone, beside)

    def _prefill(self, counts: Sequence[int]) -> Slot[Tensor]:
        """A slot with the start of the text, in chunks of these sizes; single tokens are decoded."""
        slot, at = self._slots.allocate(len(self._ids) + 1), 0
        for count in counts:
            if count == 1:
                self._decode([(slot, at)])
            else:
                self._step.prefill([sequence_chunk(slot, at, self._ids[at : at + count])])
            at += count
        return slot

    def _decode(self, sequences: Sequence[tuple[Slot[Tensor], int]]) -> Tensor:
        rows = [StepRow(sequence_chunk(slot, at, self._ids[at : at + 1]), GREEDY, 0, 0) for slot, at in sequences]
        return self._step.run(rows)[0]
