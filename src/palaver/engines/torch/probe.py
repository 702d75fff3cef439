"""Finds out, by trying, how a model can be run. A probe that raises means no."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from palaver.engines.base import BY_COMPANY, BY_TEXT, COMPILED
from palaver.engines.compiled.build import Library
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import Runner
from palaver.engines.torch.batch import BatchInputs, ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.cuda_graphs import CudaGraphCapture, GraphDecoder, StepDecoder
from palaver.engines.torch.decoders.library import LateCache, LibraryDecoder, UnsupportedModel, kv_layout
from palaver.engines.torch.decoders.plain import FusedDecoder, PlainDecoder
from palaver.engines.torch.exact import ExactPasses, probe_exactness
from palaver.engines.torch.kv_cache import KVLayout, Slot, SlotAllocator
from palaver.engines.torch.loader import quantization_config, quiet
from palaver.engines.torch.memory import ThreadCounts
from palaver.engines.torch.model_runner import Forward, TorchRunner
from palaver.engines.torch.rope import find_longrope
from palaver.engines.torch.snapshot_runner import CacheAbilities, RecurrentState, SnapshotRunner, StatelessModel
from palaver.errors import CantCompile

LENGTH = 48
FIRST = 20
SECOND = 40
LATE = 8
"""Tokens computed at the end of the context. Nothing before them is: they are told to stand there."""
PROBE_BYTES = 1 << 24
NOT_COMPILED = ", not compiled: "
FEW_OPERATIONS = "few operations"


@torch.inference_mode()
def pick_runner(
    model: PreTrainedModel,
    size: int,
    limit: int,
    context: int,
    options: EngineOptions,
    threads: ThreadCounts,
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
        probe = ModelProbe(model, size, context)
        try:
            layout = probe.layout()
            forward, steps = probe.forward(layout, context, options, library, threads)
            _check_required(options, steps)
            passes, exactness = probe.exactness(forward, layout, steps, options.exact, threads)
            length = None if probe.rope is None else probe.rope.original_length
            return TorchRunner(forward, layout, limit, context, threads, passes, length), steps, exactness
        except CantCompile:
            raise
        except Exception as error:  # whatever went wrong, there is a humbler way
            steps = _short_of(library, _OWN, error)
            _check_required(options, steps)
            runner = probe.carrying(limit, _why(error), options.exact)
            return runner, steps, runner.exactness


def _check_required(options: EngineOptions, steps: str) -> None:
    if options.compiled and steps != COMPILED:
        raise CantCompile(steps.partition(NOT_COMPILED)[2])


class ModelProbe:
    """A short text of no meaning, and what the model itself makes of it at both ends of the context."""

    def __init__(self, model: PreTrainedModel, size: int, context: int = 0) -> None:
        """`context`: 0 where only the beginning matters."""
        self._model = model
        self.rope = find_longrope(model)
        self.ids = [(i * i * 7 + i * 13 + 5) % size for i in range(LENGTH)]
        self._batch = torch.tensor([self.ids], device=model.device)
        options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        self._expected: Tensor = model(input_ids=self._batch, **options).logits[0]
        coarse = model.dtype != torch.float32 or bool(quantization_config(model.config.to_dict()))
        self._rounding = self._own_rounding() if coarse else 0.0
        self._late_start = context - LATE if context >= LENGTH + LATE else 0
        """Where the late tokens stand; 0: there is no place that is later than the others."""
        self._late: Tensor | None = None

    def layout(self) -> KVLayout:
        return kv_layout(self._model, torch.tensor(self.ids[:4], device=self._model.device))

    def forward(
        self,
        layout: KVLayout,
        context: int,
        options: EngineOptions,
        library: Future[Library] | None,
        threads: ThreadCounts,
    ) -> tuple[Forward, str]:
        """What runs a plan, and whose code that is."""
        try:
            if not options.fused:
                raise UnsupportedModel("it is not wanted")
            parts = PlainDecoder(self._model, context)
            decoder = FusedDecoder(parts)
            self.check(decoder, layout)
            self.check_late(FusedDecoder(parts.without_tables()), layout)
        except Exception as error:  # then its own code does it
            best, steps = self._recorded(self._library(layout), layout, _OWN, options)
            return best, _short_of(library, steps, error)
        best, steps = self._recorded(decoder, layout, FEW_OPERATIONS, options)
        if library is None:
            return best, steps
        try:
            from palaver.engines.compiled.decoder import CompiledDecoder  # it builds on this package

            compiled = CompiledDecoder(parts, layout, library.result(), threads.many)
            self.check(compiled, layout)
        except Exception as error:
            return best, _short_of(library, steps, error)
        return compiled, COMPILED

    def exactness(
        self, forward: Forward, layout: KVLayout, steps: str, asked: bool, threads: ThreadCounts
    ) -> tuple[ExactPasses | None, str]:
        """The passes of the exact mode, where that is asked for, and what the bits of a reply depend on."""
        if steps == COMPILED:
            return None, BY_TEXT
        if not asked:
            return None, BY_COMPANY
        experts = any("expert" in name for name, _ in self._model.named_modules())
        quantised = bool(quantization_config(self._model.config.to_dict()))
        with threads.settled():
            return probe_exactness(forward, layout, self.ids, may_pack=not (experts or quantised))

    def _recorded(
        self, decoder: StepDecoder, layout: KVLayout, steps: str, options: EngineOptions
    ) -> tuple[Forward, str]:
        """The exact mode has passes of its own, which are not recorded."""
        if layout.device.type != "cuda" or options.exact:
            return decoder, steps
        try:
            if self._waits(decoder, layout):
                return decoder, steps
            recorded = GraphDecoder(decoder, CudaGraphCapture(layout.device))
            self.check(recorded, layout)
        except Exception:  # then every operation is launched by itself
            return decoder, steps
        return (recorded, f"{steps}, recorded") if recorded.recordings else (decoder, steps)

    def _waits(self, decoder: StepDecoder, layout: KVLayout) -> bool:
        """Whether a step waits for the device in its midst, as where experts are picked one by one: that can't be
        recorded, and memory is harder to come by after a recording that failed."""
        lanes = SlotAllocator(layout, PROBE_BYTES)
        step = build_batch([self._next(lanes.open(LENGTH), 0) for _ in range(2)], layout.device).steady(LENGTH)
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

    def _library(self, layout: KVLayout) -> LibraryDecoder:
        self._expect_late()  # while its attention is its own
        forward = LibraryDecoder(self._model, self.rope)
        try:
            forward.attach()
            self.check(forward, layout)
            self.check_late(forward, layout)
        except BaseException:
            forward.detach()
            raise
        return forward

    def check(self, forward: Callable[[ForwardBatch], Tensor], layout: KVLayout) -> None:
        """Two sequences of different lengths, in chunks and token by token, must give the model's own logits."""
        lanes = SlotAllocator(layout, PROBE_BYTES)
        longer, shorter = lanes.open(LENGTH), lanes.open(LENGTH)

        def compare(planned: ForwardBatch, runs: Sequence[SequenceChunk]) -> None:
            for row, item in zip(forward(planned), runs, strict=True):
                self.compare(row, item.start + len(item.ids))

        def run(*runs: SequenceChunk) -> None:
            compare(build_batch(runs, layout.device), runs)

        run(sequence_chunk(longer, 0, self.ids[:FIRST]), sequence_chunk(shorter, 0, self.ids[:4]))
        run(sequence_chunk(longer, FIRST, self.ids[FIRST:SECOND]))
        steps: ForwardBatch | None = None
        for at in range(3):
            runs = [self._next(shorter, 4 + at), self._next(longer, SECOND + at)]
            if steps is None:
                steps = build_batch(runs, layout.device)
            else:
                steps.advance(runs)
            compare(steps, runs)
        run(self._next(longer, SECOND + 3))

    def check_late(self, forward: Forward, layout: KVLayout) -> None:
        """A sequence at the end of the context, and another at its beginning beside it, must give the model's own
        logits: what depends on the position, or on the length of a pass, is seen only there."""
        if self._late_start == 0:
            return
        expected = self._expect_late()
        lanes = SlotAllocator(layout, PROBE_BYTES)
        late, early = lanes.open(LENGTH), lanes.open(LENGTH)
        half = LATE // 2
        long = self.rope is not None and self._late_start + LATE > self.rope.original_length
        self._compare_late(
            forward, [sequence_chunk(late, 0, self.ids[:half], long), sequence_chunk(early, 0, self.ids[:3])], expected
        )
        self._compare_late(
            forward, [sequence_chunk(late, half, self.ids[half : half + 1], long), self._next(early, 3)], expected
        )

    def _compare_late(self, forward: Forward, runs: Sequence[SequenceChunk], expected: Tensor) -> None:
        """The first of these runs stands late. They share a pass, unless their frequencies differ."""
        device = expected.device
        passes = [[run] for run in runs] if runs[0].long else [list(runs)]
        rows = torch.cat(
            [forward(_moved(build_batch(some, device), runs[0].lane, self._late_start)) for some in passes]
        )
        late, early = runs
        self._compare(rows[0], expected[late.start + len(late.ids) - 1])
        self.compare(rows[1], early.start + len(early.ids))

    def _expect_late(self) -> Tensor:
        """What the model itself makes of the text where it stands late."""
        if self._late is None:
            ids = torch.tensor([self.ids[:LATE]], device=self._model.device)
            at = torch.arange(self._late_start, self._late_start + LATE, device=ids.device)[None]
            cache = LateCache(self._late_start)
            self._late = self._model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True).logits[0]
        return self._late

    def _depends_on_extent(self) -> bool:
        """Whether what is computed for the first tokens of a pass depends on how far its last ones are."""
        if self._late_start == 0:
            return False
        places = [0, 1, 2, *range(self._late_start, self._late_start + LATE - 3)]
        ids = torch.tensor([self.ids[:LATE]], device=self._model.device)
        at = torch.tensor([places], device=ids.device)
        try:
            logits = self._model(input_ids=ids, position_ids=at, past_key_values=DynamicCache(), use_cache=True).logits[
                0
            ]
            self.compare(logits[2], 3)
        except UnsupportedModel:
            return True
        except Exception:  # it isn't told positions at all
            return False
        return False

    def _next(self, lane: Slot, at: int) -> SequenceChunk:
        return sequence_chunk(lane, at, self.ids[at : at + 1])

    def carrying(self, limit: int, why: str, exact: bool) -> SnapshotRunner:
        """The model's own cache, as far as it can be trusted; at worst none at all."""
        if self._depends_on_extent() or not self._right([FIRST, 1, 1, 1]):
            return SnapshotRunner(
                lambda: StatelessModel(self._model), limit, CacheAbilities(copies=False, why_not=why), exact
            )
        copies = self._right([FIRST, 1, 1], copying=True)
        abilities = CacheAbilities(chunks=self._right([FIRST, 5, 1, SECOND - FIRST]), copies=copies, why_not=why)
        return SnapshotRunner(lambda: RecurrentState(self._model), limit, abilities, exact)

    def compare(self, logits: Tensor, tokens: int) -> None:
        """Raises unless these are the logits after so many tokens, up to rounding."""
        self._compare(logits, self._expected[tokens - 1])

    def _compare(self, logits: Tensor, expected: Tensor) -> None:
        unit = _TOLERANCE[self._model.dtype] * max(1.0, float(expected.abs().max()))
        if not _apart(logits, expected) <= max(unit, 2 * self._rounding):
            raise UnsupportedModel("its cache doesn't give what the model itself gives")

    def _own_rounding(self) -> float:
        """How far apart the model's own answers are where only rounding differs: taken in pieces, and with another
        implementation of its attention or, where it has but one, after a change of its input in the last place. Much,
        where it quantises what it computes as it goes, or where rounding decides which experts are asked."""
        eager = self._model.config._attn_implementation == "eager"
        other = self._after_a_nudge() if eager else self._with_eager_attention()
        return max(*_until_it_raises(self._in_pieces()), *_until_it_raises(other))

    def _in_pieces(self) -> Iterator[float]:
        state, at = RecurrentState(self._model), 0
        for size in (4, FIRST - 4, 1, 1, SECOND - FIRST - 2, 1, 1, 1):
            at += size
            yield _apart(state.feed(self.ids[at - size : at]), self._expected[at - 1])

    def _with_eager_attention(self) -> Iterator[float]:
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")
        try:
            yield _apart(self._model(input_ids=self._batch).logits[0], self._expected)
        finally:
            self._model.set_attn_implementation(before)

    def _after_a_nudge(self) -> Iterator[float]:
        embedded = self._model.get_input_embeddings()(self._batch)
        signs = (torch.arange(embedded.numel(), device=embedded.device) * 7919 // 64 % 2).view_as(embedded) * 2 - 1
        nudged = embedded + embedded * signs * torch.finfo(embedded.dtype).eps
        yield _apart(self._model(inputs_embeds=nudged.to(embedded.dtype)).logits[0], self._expected)

    def _right(self, sizes: Sequence[int], copying: bool = False) -> bool:
        try:
            self._carry(sizes, copying)
        except Exception:  # a probe that raises means no
            return False
        return True

    def _carry(self, sizes: Sequence[int], copying: bool) -> None:
        state, at = RecurrentState(self._model), 0
        for size in sizes:
            if copying:
                state.copy().feed([1])  # must leave the original alone
                state = state.copy()
            at += size
            self.compare(state.feed(self.ids[at - size : at]), at)


_OWN = "the model's own code"
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the greatest logit, whatever the model's own rounding: about one unit in the last place of a narrow type."""


def _until_it_raises(trial: Iterator[float]) -> Iterator[float]:
    """What a trial gives, and 0; a model that can't be tried this way is one of which less is known."""
    yield 0.0
    with suppress(Exception):
        yield from trial


def _apart(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected.float()).abs().max())


def _moved(planned: ForwardBatch, lane: Slot, by: int) -> ForwardBatch:
    """The same pass, with the tokens of this lane told to stand so much later; where they are stored doesn't change."""
    shifts = [by if run.lane is lane else 0 for run in planned.runs for _ in run.ids]
    positions = [at + shift for at, shift in zip(planned.positions.tolist(), shifts, strict=True)]
    numbers = BatchInputs(planned.ids.tolist(), positions, planned.ids.device)
    return replace(planned, numbers=numbers, furthest=max(positions))


def _short_of(library: Future[Library] | None, steps: str, error: Exception) -> str:
    """Whose code it is, and, where compiled steps were wanted, why it isn't that."""
    return steps if library is None else f"{steps}{NOT_COMPILED}{_why(error)}"


def _why(error: Exception) -> str:
    if isinstance(error, CantCompile):
        return error.why
    return str(error) if isinstance(error, UnsupportedModel) else f"its cache isn't understood ({type(error).__name__})"
