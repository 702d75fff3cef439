"""CUDA graphs: decode passes are captured, and replayed when the same slots decode again.

Launching a pass's many small operations one by one takes longer than computing them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from palaver.engines.core.kv_cache import SlotPool
from palaver.engines.torch.batch import BatchInputs, ForwardBatch

LENGTH_MULTIPLE = 256
"""Tokens. A graph serves until the longest sequence has outgrown the next multiple of this."""
MAX_GRAPHS = 16

Pass: TypeAlias = Callable[[], Tensor]
Capture: TypeAlias = Callable[[Pass], Pass]
"""Captures what a pass does to memory; returns the replay. The pass's own Python runs only once."""


def watch_synchronization(run: Pass) -> tuple[Tensor, bool]:
    """Runs a pass. Also returns whether it synchronises with the device, as where experts are picked one by one: that
    can't be captured, and a failed capture fragments the memory."""
    if not torch.cuda.is_available():
        return run(), False
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return out, any("synchronizing" in str(warning.message) for warning in caught)


class StepDecoder(Protocol):
    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where the batch needs none."""
        ...

    @property
    def pair_bytes(self) -> int:
        """The memory that attention takes for each pair of a query and a key, in a prefill."""
        ...

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """Builds the tables for passes over so many tokens; returns those that a longer text may replace."""
        ...


@dataclass(slots=True)
class CapturedGraph:
    """A captured decode pass over certain slots. It holds the tensors that it reads, but not the pools: those may be
    freed, and the graph is then invalid."""

    pools: tuple[weakref.ref[SlotPool[Tensor]], ...]
    inputs: BatchInputs
    extra_tensors: tuple[Tensor, ...]
    replay: Pass

    def matches_slots(self, batch: ForwardBatch) -> bool:
        """Returns False where the pools were freed and their ids reused."""
        return all(pool() is chunk.pool for pool, chunk in zip(self.pools, batch.chunks, strict=True))


class GraphDecoder:
    """Gives the same bits whether a pass is replayed or computed: both attend over the same padded length."""

    def __init__(self, decoder: StepDecoder, capture: Capture) -> None:
        self._decoder = decoder
        self._capture = capture
        self._graphs: dict[Hashable, CapturedGraph] = {}
        """Least recently used first."""
        self._batch: Callable[[], ForwardBatch | None] = lambda: None
        self._length = 0
        """The padded length of the current batch."""
        self._graph: CapturedGraph | None = None
        self._may_capture = True

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where the batch needs none.

        The first pass of a batch is computed, the second captured: many batches change after a token.
        """
        if not batch.is_decode or batch.has_media:
            return self._decoder(batch)
        if self._batch() is not batch or batch.max_position >= self._length:
            self._batch = weakref.ref(batch)
            self._length = (batch.max_position // LENGTH_MULTIPLE + 1) * LENGTH_MULTIPLE
            self._graph = self._find_graph(batch)
            self._may_capture = True
        elif self._graph is None and self._may_capture:
            self._graph = self._capture_graph(batch)
        if self._graph is None:
            return self._decoder(batch.padded_to(self._length))
        self._graph.inputs.copy_from(batch.inputs)
        return self._graph.replay()

    @property
    def pair_bytes(self) -> int:
        return self._decoder.pair_bytes

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def _find_graph(self, batch: ForwardBatch) -> CapturedGraph | None:
        key = self._key(batch)
        graph = self._graphs.pop(key, None)
        if graph is None or not graph.matches_slots(batch):
            return None
        self._graphs[key] = graph
        return graph

    def _capture_graph(self, batch: ForwardBatch) -> CapturedGraph | None:
        """None where capturing fails, for example for lack of memory; the next batch tries again."""
        length = self._length
        extra_tensors = (*batch.extra_tensors, *self._decoder.prepare(length))
        try:
            replay = self._capture(lambda: self._decoder(batch.padded_to(length)))
        except RuntimeError:
            self._may_capture = False
            return None
        pools = tuple(weakref.ref(chunk.pool) for chunk in batch.chunks)
        graph = CapturedGraph(pools, batch.inputs, extra_tensors, replay)
        self._graphs[self._key(batch)] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _key(self, batch: ForwardBatch) -> Hashable:
        slots = ((id(chunk.pool), chunk.index) for chunk in batch.chunks)
        return (self._length, batch.long_rope, batch.order, *slots)


class CudaGraphCapture:
    """Captures CUDA graphs that share their memory: they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        """Held until the next capture: the shared memory is freed with the last graph that uses it."""

    def __call__(self, run: Pass) -> Pass:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = self._capture(graph, run)
        current.wait_stream(self._stream)
        self._last = graph

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Pass) -> Tensor:
        collects = gc.isenabled()
        gc.disable()  # freeing an old graph while another is captured would spoil it
        try:
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                return run()
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
