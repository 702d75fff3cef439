"""Compares what runs a batch with expected logits: sequences of different lengths, in chunks and by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from palaver.engines.base import COMPILED
from palaver.engines.compiled.build import Library
from palaver.engines.compiled.decoder import CompiledDecoder, RowChunk, Rows
from palaver.engines.core.kv_cache import HostArray, Slot, SlotAllocator
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.cuda_graphs import CudaGraphCapture, GraphDecoder, StepDecoder, watch_synchronization
from palaver.engines.torch.devices import TensorLayout
from palaver.engines.torch.model_runner import Forward
from palaver.errors import CantCompile

LENGTH = 48
FIRST = 20
SECOND = 40
"""Tokens of the probe's text, of its first chunk, and of its first two chunks."""
PROBE_BYTES = 1 << 24
NOT_COMPILED = ", not compiled: "
FEW_OPERATIONS = "few operations"
CUDA_KERNELS = "CUDA kernels"
LIBRARY_CODE = "the model's own code"
LIBRARY_AND_KERNELS = f"{LIBRARY_CODE} and kernels"
KERNELS_VERSION = LAYER_KERNELS_VERSION = 1
"""Raised when the CUDA kernels may give the same text other bits than before: those of a whole step, and those of some
layers of the library's models."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative to the largest logit: about one unit in the last place of a narrow dtype."""


class ForwardProbe:
    """An arbitrary short text, and its expected logits."""

    def __init__(self, ids: list[int], expected: Tensor, dtype: torch.dtype, rounding: float = 0.0) -> None:
        """`expected`: the logits after each token. `rounding`: how much they differ where only rounding differs."""
        self.ids = ids
        self._expected = expected
        self._dtype = dtype
        self._rounding = rounding

    def check(self, forward: Callable[[ForwardBatch], Tensor], layout: TensorLayout) -> None:
        """Raises unless two sequences of different lengths, in chunks and by token, give the model's own logits."""
        slots = SlotAllocator(layout, PROBE_BYTES)
        longer, shorter = slots.allocate(LENGTH), slots.allocate(LENGTH)

        def compare(batch: ForwardBatch, chunks: Sequence[SequenceChunk]) -> None:
            for row, chunk in zip(forward(batch), chunks, strict=True):
                self.compare(row, chunk.start + len(chunk.ids))

        def run(*chunks: SequenceChunk) -> None:
            compare(build_batch(chunks, layout.device), chunks)

        run(sequence_chunk(longer, 0, self.ids[:FIRST]), sequence_chunk(shorter, 0, self.ids[:4]))
        run(sequence_chunk(longer, FIRST, self.ids[FIRST:SECOND]))
        batch: ForwardBatch | None = None
        for at in range(3):
            chunks = [self._next_token(shorter, 4 + at), self._next_token(longer, SECOND + at)]
            if batch is None:
                batch = build_batch(chunks, layout.device)
            else:
                batch.advance(chunks)
            compare(batch, chunks)
        run(self._next_token(longer, SECOND + 3))

    def check_compiled(self, decoder: CompiledDecoder) -> None:
        """As `check`, for compiled steps."""
        slots = SlotAllocator(decoder.layout, PROBE_BYTES)
        longer, shorter = slots.allocate(LENGTH), slots.allocate(LENGTH)

        def run(*spans: tuple[Slot[HostArray], int, int]) -> None:
            rows = Rows([RowChunk(slot, start, self.ids[start:stop]) for slot, start, stop in spans], need_logits=True)
            for row, (_, _, stop) in zip(decoder.run(rows, 1), spans, strict=True):
                self.compare(torch.from_numpy(row), stop)

        run((longer, 0, FIRST), (shorter, 0, 4))
        run((longer, FIRST, SECOND))
        for at in range(3):
            run((shorter, 4 + at, 5 + at), (longer, SECOND + at, SECOND + at + 1))

    def compare(self, logits: Tensor, tokens: int) -> None:
        """Raises unless these are the logits after so many tokens, up to rounding."""
        self.compare_with(logits, self._expected[tokens - 1])

    def compare_with(self, logits: Tensor, expected: Tensor) -> None:
        """Raises unless these logits are the expected ones, up to rounding."""
        unit = _TOLERANCE[self._dtype] * max(1.0, float(expected.abs().max()))
        if not max_difference(logits, expected) <= max(unit, 2 * self._rounding):
            raise UnsupportedModel("its results with a cache differ from those without")

    def with_cuda_graphs(
        self, decoder: StepDecoder, layout: TensorLayout, steps: str, options: EngineOptions
    ) -> tuple[Forward, str]:
        """Adds CUDA graphs where they work. The exact mode has passes of its own, which are not captured."""
        if layout.device.type != "cuda" or options.exact:
            return decoder, steps
        try:
            if self.synchronizes(decoder, layout):
                return decoder, steps
            graphs = GraphDecoder(decoder, CudaGraphCapture(layout.device))
            self.check(graphs, layout)
        except Exception:  # then every operation is launched by itself
            return decoder, steps
        return (graphs, f"{steps}, recorded") if graphs.num_graphs else (decoder, steps)

    def synchronizes(self, decoder: StepDecoder, layout: TensorLayout) -> bool:
        """Whether a decode pass synchronises with the device."""
        slots = SlotAllocator(layout, PROBE_BYTES)
        chunks = [self._next_token(slots.allocate(LENGTH), 0) for _ in range(2)]
        batch = build_batch(chunks, layout.device).padded_to(LENGTH)
        decoder(batch)  # builds what is built only once
        return watch_synchronization(lambda: decoder(batch))[1]

    def _next_token(self, slot: Slot[Tensor], at: int) -> SequenceChunk:
        return sequence_chunk(slot, at, self.ids[at : at + 1])


def probe_ids(vocabulary_size: int) -> list[int]:
    return [(i * i * 7 + i * 13 + 5) % vocabulary_size for i in range(LENGTH)]


def max_difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected.float()).abs().max())


def check_required(options: EngineOptions, steps: str) -> None:
    if options.compiled and steps != COMPILED:
        raise CantCompile(steps.partition(NOT_COMPILED)[2])


def explain_not_compiled(library: Future[Library] | None, steps: str, error: Exception) -> str:
    """Whose code computes the steps and, where compiled steps were requested, why they are not used."""
    return steps if library is None else f"{steps}{NOT_COMPILED}{failure_reason(error)}"


def failure_reason(error: Exception) -> str:
    if isinstance(error, CantCompile):
        return error.why
    return str(error) if isinstance(error, UnsupportedModel) else f"its cache isn't understood ({type(error).__name__})"
