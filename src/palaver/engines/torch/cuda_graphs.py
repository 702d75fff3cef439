"""A model on an accelerator: passes for next tokens are recorded, and played where the same lanes come again.

To launch its many small operations one by one takes longer than to compute them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from palaver.engines.torch.batch import BatchInputs, ForwardBatch
from palaver.engines.torch.kv_cache import SlotPool

REACH = 256
"""Tokens. A recording serves until the longest sequence has outgrown the next multiple of this."""
MOST = 16
"""Recordings that are kept."""

Pass: TypeAlias = Callable[[], Tensor]
Recorder: TypeAlias = Callable[[Pass], Pass]
"""What a pass does to memory, to be done again; its own Python runs only once."""


class StepDecoder(Protocol):
    def __call__(self, plan: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where they are not asked for."""
        ...

    @property
    def pair_bytes(self) -> int:
        """What attention takes for each pair of a query and a key, where several tokens of a sequence are computed."""
        ...

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """Makes all that passes over so many tokens will look up, and gives what of it may be replaced later."""
        ...


@dataclass(slots=True)
class CapturedGraph:
    """A pass over certain lanes. It keeps what it points to, but not the lanes: those may go, and it with them."""

    banks: tuple[weakref.ref[SlotPool], ...]
    numbers: BatchInputs
    own: tuple[Tensor, ...]
    play: Pass

    def is_over_lanes_of(self, plan: ForwardBatch) -> bool:
        """Returns False where the slots were freed and reused."""
        return all(bank() is run.bank for bank, run in zip(self.banks, plan.runs, strict=True))


class GraphDecoder:
    """Gives the same bits whether a pass is played or computed: both attend as far as a recording reaches."""

    def __init__(self, decoder: StepDecoder, record: Recorder) -> None:
        self._decoder = decoder
        self._record = record
        self._recordings: dict[Hashable, CapturedGraph] = {}
        """Those not played for longest first."""
        self._plan: Callable[[], ForwardBatch | None] = lambda: None
        self._reach = 0
        self._now: CapturedGraph | None = None
        self._worth_recording = True

    def __call__(self, plan: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where they are not asked for."""
        if not plan.steps:
            return self._decoder(plan)
        if self._plan() is not plan or plan.furthest >= self._reach:
            self._plan = weakref.ref(plan)
            self._reach = (plan.furthest // REACH + 1) * REACH
            self._now = self._known(plan)
            self._worth_recording = True
        elif self._now is None and self._worth_recording:  # whoever leaves after a token is not
            self._now = self._recorded(plan)
        if self._now is None:
            return self._decoder(plan.steady(self._reach))
        self._now.numbers.take(plan.numbers)
        return self._now.play()

    @property
    def pair_bytes(self) -> int:
        return self._decoder.pair_bytes

    @property
    def recordings(self) -> int:
        return len(self._recordings)

    def _known(self, plan: ForwardBatch) -> CapturedGraph | None:
        key = self._key(plan)
        recording = self._recordings.pop(key, None)
        if recording is None or not recording.is_over_lanes_of(plan):
            return None
        self._recordings[key] = recording
        return recording

    def _recorded(self, plan: ForwardBatch) -> CapturedGraph | None:
        """None where it can't be, for want of memory say: then it is tried again when others come or go."""
        reach = self._reach
        own = (*plan.own, *self._decoder.prepare(reach))
        try:
            play = self._record(lambda: self._decoder(plan.steady(reach)))
        except RuntimeError:
            self._worth_recording = False
            return None
        recording = CapturedGraph(tuple(weakref.ref(run.bank) for run in plan.runs), plan.numbers, own, play)
        self._recordings[self._key(plan)] = recording
        if len(self._recordings) > MOST:
            del self._recordings[next(iter(self._recordings))]
        return recording

    def _key(self, plan: ForwardBatch) -> Hashable:
        return (self._reach, plan.long, plan.order, *((id(run.bank), run.index) for run in plan.runs))


class CudaGraphCapture:
    """Records into CUDA graphs, which use the same memory: they are played one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        """Held until there is another, for the memory goes with the last that uses it."""

    def __call__(self, run: Pass) -> Pass:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            out = self._capture(graph, run)
        here.wait_stream(self._stream)
        self._last = graph

        def play() -> Tensor:
            graph.replay()
            return out

        return play

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
