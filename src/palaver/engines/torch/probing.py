"""Finds out, by trying, how a model can be run. A probe that raises means no."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from palaver.engines.base import BY_COMPANY, BY_TEXT, COMPILED
from palaver.engines.torch.compiled.building import Library
from palaver.engines.torch.compiled.decoder import CompiledDecoder
from palaver.engines.torch.cutting import CuttingRunner
from palaver.engines.torch.exact import ExactPasses, probe_exactness
from palaver.engines.torch.fused import FusedDecoder
from palaver.engines.torch.lanes import Lane, Lanes, Layout
from palaver.engines.torch.library import LibraryForward, NotUnderstood, layout_of
from palaver.engines.torch.loading import quiet
from palaver.engines.torch.options import Options
from palaver.engines.torch.plain import PlainDecoder
from palaver.engines.torch.planning import Plan, Run, plan, run_of
from palaver.engines.torch.quantisation import quantisation
from palaver.engines.torch.recorded import CudaRecorder, Decoder, RecordedDecoder
from palaver.engines.torch.runner import Runner
from palaver.engines.torch.snapshots import Abilities, SnapshotRunner
from palaver.engines.torch.states import NoState, State
from palaver.engines.torch.threads import Threads
from palaver.errors import CantCompile

LENGTH = 48
FIRST = 20
SECOND = 40
PROBE_BYTES = 1 << 24
NOT_COMPILED = ", not compiled: "
FEW_OPERATIONS = "few operations"

Forward: TypeAlias = Callable[[Plan], Tensor]


@torch.inference_mode()
def pick_runner(
    model: PreTrainedModel,
    size: int,
    limit: int,
    context: int,
    options: Options,
    threads: Threads,
    library: Future[Library] | None = None,
) -> tuple[Runner, str, str]:
    """The best way to run this model that gives what the model itself gives, whose code its steps are, and what the
    bits of a reply depend on (`EngineInfo.exactness`).

    `library` is the code of compiled steps, or why there is none; it is waited for only where the model is a plain
    decoder. Raises CantCompile where compiled steps are required and can't be used.
    """
    if model.device.type == "cuda":
        # it makes a plan for every new pair of lengths: 20 ms each, and memory that is never given back
        torch.backends.cuda.enable_cudnn_sdp(False)
    with quiet():
        probe = Probe(model, size)
        try:
            layout = probe.layout()
            forward, steps = probe.forward(layout, context, options, library, threads)
            _check_required(options, steps)
            passes, exactness = probe.exactness(forward, layout, steps, options.exact, threads)
            return CuttingRunner(forward, layout, limit, context, threads, passes), steps, exactness
        except CantCompile:
            raise
        except Exception as error:  # whatever went wrong, there is a humbler way
            steps = _short_of(library, _OWN, error)
            _check_required(options, steps)
            runner = probe.carrying(limit, _why(error), options.exact)
            return runner, steps, runner.exactness


def _check_required(options: Options, steps: str) -> None:
    if options.compiled and steps != COMPILED:
        raise CantCompile(steps.partition(NOT_COMPILED)[2])


class Probe:
    """A short text of no meaning, and what the model itself makes of it."""

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        self._model = model
        self.ids = [(i * i * 7 + i * 13 + 5) % size for i in range(LENGTH)]
        batch = torch.tensor([self.ids], device=model.device)
        options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        self._expected: Tensor = model(input_ids=batch, **options).logits[0]
        coarse = model.dtype != torch.float32 or bool(quantisation(model.config.to_dict()))
        self._rounding = self._own_rounding() if coarse else 0.0

    def layout(self) -> Layout:
        return layout_of(self._model, torch.tensor(self.ids[:4], device=self._model.device))

    def forward(
        self, layout: Layout, context: int, options: Options, library: Future[Library] | None, threads: Threads
    ) -> tuple[Forward, str]:
        """What runs a plan, and whose code that is."""
        try:
            if not options.fused:
                raise NotUnderstood("it is not wanted")
            parts = PlainDecoder(self._model, context)
            decoder = FusedDecoder(parts)
            self.check(decoder, layout)
        except Exception as error:  # then its own code does it
            best, steps = self._recorded(self._library(layout), layout, _OWN, options)
            return best, _short_of(library, steps, error)
        best, steps = self._recorded(decoder, layout, FEW_OPERATIONS, options)
        if library is None:
            return best, steps
        try:
            compiled = CompiledDecoder(parts, layout, library.result(), threads.many)
            self.check(compiled, layout)
        except Exception as error:
            return best, _short_of(library, steps, error)
        return compiled, COMPILED

    def exactness(
        self, forward: Forward, layout: Layout, steps: str, asked: bool, threads: Threads
    ) -> tuple[ExactPasses | None, str]:
        """The passes of the exact mode, where that is asked for, and what the bits of a reply depend on."""
        if steps == COMPILED:
            return None, BY_TEXT
        if not asked:
            return None, BY_COMPANY
        experts = any("expert" in name for name, _ in self._model.named_modules())
        quantised = bool(quantisation(self._model.config.to_dict()))
        with threads.settled():
            return probe_exactness(forward, layout, self.ids, may_pack=not (experts or quantised))

    def _recorded(self, decoder: Decoder, layout: Layout, steps: str, options: Options) -> tuple[Forward, str]:
        """The exact mode has passes of its own, which are not recorded."""
        if layout.device.type != "cuda" or options.exact:
            return decoder, steps
        try:
            if self._waits(decoder, layout):
                return decoder, steps
            recorded = RecordedDecoder(decoder, CudaRecorder(layout.device))
            self.check(recorded, layout)
        except Exception:  # then every operation is launched by itself
            return decoder, steps
        return (recorded, f"{steps}, recorded") if recorded.recordings else (decoder, steps)

    def _waits(self, decoder: Decoder, layout: Layout) -> bool:
        """Whether a step waits for the device in its midst, as where experts are picked one by one: that can't be
        recorded, and memory is harder to come by after a recording that failed."""
        lanes = Lanes(layout, PROBE_BYTES)
        step = plan([self._next(lanes.open(LENGTH)[0], 0) for _ in range(2)], layout.device).steady(LENGTH)
        decoder(step)  # what is made only once is made now
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                decoder(step)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return any("synchronizing" in str(warning.message) for warning in said)

    def _library(self, layout: Layout) -> LibraryForward:
        forward = LibraryForward(self._model)
        try:
            forward.attach()
            self.check(forward, layout)
        except BaseException:
            forward.detach()
            raise
        return forward

    def check(self, forward: Callable[[Plan], Tensor], layout: Layout) -> None:
        """Two sequences of different lengths, in chunks and token by token, must give the model's own logits."""
        lanes = Lanes(layout, PROBE_BYTES)
        longer, shorter = lanes.open(LENGTH)[0], lanes.open(LENGTH)[0]

        def compare(planned: Plan, runs: Sequence[Run]) -> None:
            for row, item in zip(forward(planned), runs, strict=True):
                self.compare(row, item.start + len(item.ids))

        def run(*runs: Run) -> None:
            compare(plan(runs, layout.device), runs)

        run(run_of(longer, 0, self.ids[:FIRST]), run_of(shorter, 0, self.ids[:4]))
        run(run_of(longer, FIRST, self.ids[FIRST:SECOND]))
        steps: Plan | None = None
        for at in range(3):
            runs = [self._next(shorter, 4 + at), self._next(longer, SECOND + at)]
            if steps is None:
                steps = plan(runs, layout.device)
            else:
                steps.advance(runs)
            compare(steps, runs)
        run(self._next(longer, SECOND + 3))

    def _next(self, lane: Lane, at: int) -> Run:
        return run_of(lane, at, self.ids[at : at + 1])

    def carrying(self, limit: int, why: str, exact: bool) -> SnapshotRunner:
        """The model's own cache, as far as it can be trusted; at worst none at all."""
        if not self._right([FIRST, 1, 1, 1]):
            return SnapshotRunner(lambda: NoState(self._model), limit, Abilities(copies=False, why_not=why), exact)
        copies = self._right([FIRST, 1, 1], copying=True)
        abilities = Abilities(chunks=self._right([FIRST, 5, 1, SECOND - FIRST]), copies=copies, why_not=why)
        return SnapshotRunner(lambda: State(self._model), limit, abilities, exact)

    def compare(self, logits: Tensor, tokens: int) -> None:
        """Raises unless these are the logits after so many tokens, up to rounding."""
        expected = self._expected[tokens - 1].float()
        allowed = _TOLERANCE[self._model.dtype] * max(1.0, float(expected.abs().max()))
        allowed = max(allowed, 2 * self._rounding)
        if not float((logits.float() - expected).abs().max()) <= allowed:
            raise NotUnderstood("its cache doesn't give what the model itself gives")

    def _own_rounding(self) -> float:
        """How far apart the model's own answers are, taken whole and in pieces: much, where it quantises what it
        computes as it goes, or where rounding decides which experts are asked."""
        state, at, most = State(self._model), 0, 0.0
        try:
            for size in (FIRST, 1, 1, SECOND - FIRST):
                at += size
                logits = state.feed(self.ids[at - size : at])
                most = max(most, float((logits.float() - self._expected[at - 1].float()).abs().max()))
        except Exception:  # then it has no cache to speak of
            return most
        return most

    def _right(self, sizes: Sequence[int], copying: bool = False) -> bool:
        try:
            self._carry(sizes, copying)
        except Exception:  # a probe that raises means no
            return False
        return True

    def _carry(self, sizes: Sequence[int], copying: bool) -> None:
        state, at = State(self._model), 0
        for size in sizes:
            if copying:
                state.copy().feed([1])  # must leave the original alone
                state = state.copy()
            at += size
            self.compare(state.feed(self.ids[at - size : at]), at)


_OWN = "the model's own code"
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def _short_of(library: Future[Library] | None, steps: str, error: Exception) -> str:
    """Whose code it is, and, where compiled steps were wanted, why it isn't that."""
    return steps if library is None else f"{steps}{NOT_COMPILED}{_why(error)}"


def _why(error: Exception) -> str:
    if isinstance(error, CantCompile):
        return error.why
    return str(error) if isinstance(error, NotUnderstood) else f"its cache isn't understood ({type(error).__name__})"
