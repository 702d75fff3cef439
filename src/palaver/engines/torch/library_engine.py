"""Loads any model that the transformers library knows, and picks the fastest runner whose logits agree with the model's
own, by trying. A trial that raises is a no."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from palaver.engines.base import BY_BATCH, BY_TEXT, COMPILED, EngineInfo
from palaver.engines.compiled.build import Library
from palaver.engines.compiled.decoder import CompiledDecoder, CompiledRunner
from palaver.engines.core.kv_cache import Slot, SlotAllocator
from palaver.engines.core.options import EngineOptions, check_cache_bytes
from palaver.engines.core.runner import SMALL_MODEL, Runner, UnsupportedModel
from palaver.engines.torch.batch import BatchInputs, ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.compiled_media import CompiledMediaRunner, MediaRotations, check_compiled_media
from palaver.engines.torch.cuda_graphs import CudaGraphCapture
from palaver.engines.torch.devices import (
    TensorLayout,
    TorchThreads,
    cache_bytes,
    check_fit,
    free_bytes,
    quantization_config,
)
from palaver.engines.torch.engine import TorchEngine, start_library_build
from palaver.engines.torch.forward_probe import (
    CUDA_KERNELS,
    FEW_OPERATIONS,
    FIRST,
    LENGTH,
    LIBRARY_AND_KERNELS,
    LIBRARY_CODE,
    PROBE_BYTES,
    SECOND,
    ForwardProbe,
    check_required,
    explain_not_compiled,
    failure_reason,
    max_difference,
    probe_ids,
)
from palaver.engines.torch.hybrid_decoder import HybridDecoder, hybrid_layout
from palaver.engines.torch.hybrid_runner import HybridRunner
from palaver.engines.torch.library_decoder import (
    LibraryDecoder,
    OffsetCache,
    TextAndMediaDecoder,
    find_longrope,
    kv_layout,
)
from palaver.engines.torch.loader import (
    context_length,
    end_ids,
    has_processor,
    load_model,
    merge_adapter,
    open_checkpoint,
    quiet,
    sampling_defaults,
)
from palaver.engines.torch.media import MediaEncoder, find_decoder
from palaver.engines.torch.model_runner import ExactPasses, Forward, TorchRunner, pick_step_runner, probe_exactness
from palaver.engines.torch.plain_decoder import FusedDecoder, PlainDecoder, compile_decoder
from palaver.engines.torch.snapshot_runner import CacheAbilities, RecurrentState, SnapshotRunner, StatelessModel
from palaver.errors import CantCompile
from palaver.memory import give_back_unused
from palaver.phases import Vocabulary

if TYPE_CHECKING:
    from palaver.engines.torch.step_weights import StepModel

_log = logging.getLogger(__name__)


def load_library_model(
    model: str | Path,
    vocabulary: Vocabulary,
    device: torch.device,
    dtype: torch.dtype,
    options: EngineOptions,
    adapter: Path | None = None,
    quantize_bits: int | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> TorchEngine:
    checkpoint = open_checkpoint(model)
    check_fit(checkpoint, device, dtype, compiled=bool(options.compiled))
    library = start_library_build(checkpoint, device, dtype, options)
    loaded = load_model(checkpoint, device, dtype, quantize_bits)
    if adapter is not None:
        loaded = merge_adapter(loaded, adapter)
    check_cache_bytes(options, free_bytes(device), str(device))
    big = not _is_small(loaded)
    media = _load_media(loaded, checkpoint.folder)
    engine = model_engine(checkpoint.name, loaded, vocabulary, options, library, on_failure, media)
    del loaded  # compiled steps hold a copy of the weights: then these can be freed
    if big:
        give_back_unused()
    return engine


def _load_media(model: PreTrainedModel, folder: Path) -> MediaEncoder | None:
    if not has_processor(folder):
        return None
    from palaver.engines.torch.processors import load_processor  # takes time that other models don't need

    processor = load_processor(folder)
    return None if processor is None else MediaEncoder(model, processor)


def model_engine(
    name: str,
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    options: EngineOptions | None = None,
    library: Future[Library] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
    media: MediaEncoder | None = None,
) -> TorchEngine:
    """An engine for a loaded model. `library`: the code of compiled steps; None where they are off. `media`: None for
    models that take text only."""
    options = options or EngineOptions()
    info = _info(name, model)
    if options.context is not None:
        info = replace(info, context_length=min(info.context_length, options.context))
    cache_limit = cache_bytes(model.device) if options.cache_bytes is None else options.cache_bytes
    small = _is_small(model)
    threads = TorchThreads.choose(options.threads, small)
    runner, steps, exactness = pick_runner(
        model, info.vocabulary_size, cache_limit, info.context_length, options, threads, library, media
    )
    info = replace(info, steps=steps, exactness=exactness)
    cache = None if media is None else media.cache
    return TorchEngine(info, vocabulary, runner, options, threads, small, library, on_failure, cache)


def _info(name: str, model: PreTrainedModel) -> EngineInfo:
    return EngineInfo(
        model=name,
        context_length=context_length(model),
        vocabulary_size=int(model.get_output_embeddings().weight.shape[0]),
        end_ids=end_ids(model),
        defaults=sampling_defaults(model.generation_config),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _is_small(model: PreTrainedModel) -> bool:
    return sum(p.nbytes for p in model.parameters()) <= SMALL_MODEL


LATE = 8
"""Tokens computed at the last positions of the context, without any tokens before them."""


@torch.inference_mode()
def pick_runner(
    model: PreTrainedModel,
    vocabulary_size: int,
    cache_bytes: int,
    context_length: int,
    options: EngineOptions,
    threads: TorchThreads,
    library: Future[Library] | None = None,
    media: MediaEncoder | None = None,
) -> tuple[Runner, str, str]:
    """The runner, whose code computes its steps (`EngineInfo.steps`), and what the bits of a reply depend on
    (`EngineInfo.exactness`).

    `library` resolves to the compiled code, or raises why there is none; it is awaited only where the model is a plain
    decoder. Raises CantCompile where compiled steps are required and can't be used.
    """
    if model.device.type == "cuda":
        # cuDNN builds a plan for every new pair of lengths: 20 ms each, and memory that is never freed
        torch.backends.cuda.enable_cudnn_sdp(False)
    with quiet():
        probe = ModelProbe(model, vocabulary_size, context_length, media)
        try:
            layout = probe.layout()
            forward, steps = probe.pick_forward(layout, context_length, options, library, threads)
            if isinstance(forward, CompiledDecoder) and media is not None and probe.rotations is not None:
                media.free_decoder()
                limits = (cache_bytes, context_length, threads, options.drafts is not False)
                return CompiledMediaRunner(forward, media, probe.rotations, *limits), COMPILED, BY_TEXT
            check_required(options, steps)
            if isinstance(forward, CompiledDecoder):
                compiled = CompiledRunner(forward, cache_bytes, context_length, threads, options.drafts is not False)
                return compiled, COMPILED, BY_TEXT
            if probe.step is not None:
                read, computes = probe.step
                own = pick_step_runner(
                    read,
                    computes,
                    layout,
                    cache_bytes,
                    context_length,
                    threads,
                    options,
                    probe.ids,
                    media,
                    long_prompts=not isinstance(computes, LibraryDecoder),
                )
                if own is not None:
                    return own[0], CUDA_KERNELS, own[1]
            passes, exactness = probe.pick_exact_passes(forward, layout, options.exact, threads)
            length = None if probe.rope is None else probe.rope.original_length
            choices: dict[str, Any] = {"run_ahead": options.run_ahead, "drafts": bool(options.drafts), "media": media}
            torch_runner = TorchRunner(forward, layout, cache_bytes, context_length, threads, passes, length, **choices)
            return torch_runner, steps, exactness
        except CantCompile:
            raise
        except Exception as error:  # whatever went wrong, the model's own cache may still work
            check_required(options, explain_not_compiled(library, LIBRARY_CODE, error))
            runner, steps = probe.pick_snapshot_runner(
                cache_bytes, context_length, threads, failure_reason(error), options.exact
            )
            return runner, explain_not_compiled(library, steps, error), runner.exactness


class ModelProbe(ForwardProbe):
    """An arbitrary short text, and the model's own logits for it at both ends of the context."""

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary_size: int,
        context_length: int = 0,
        media: MediaEncoder | None = None,
    ) -> None:
        """`context_length`: 0 where late positions are not probed."""
        self._model = model
        self._media = media
        self.step: tuple[Callable[[], StepModel], Forward] | None = None
        """If the CUDA kernels may know its kind: what reads its weights for them, and what computes its prompts."""
        self.rope = find_longrope(model)
        ids = probe_ids(vocabulary_size)
        self._batch = torch.tensor([ids], device=model.device)
        options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        super().__init__(ids, model(input_ids=self._batch, **options).logits[0], model.dtype)
        coarse = model.dtype != torch.float32 or bool(quantization_config(model.config.to_dict()))
        if coarse:
            self._rounding = self._measure_rounding()
        self._late_start = context_length - LATE if context_length >= LENGTH + LATE else 0
        """The position of the late tokens; 0: the context is too short for them."""
        self._late_logits: Tensor | None = None
        self.rotations: MediaRotations | None = None
        """Those of media, if steps with media are compiled."""

    def layout(self) -> TensorLayout:
        return kv_layout(self._model, torch.tensor(self.ids[:4], device=self._model.device))

    def pick_forward(
        self,
        layout: TensorLayout,
        context_length: int,
        options: EngineOptions,
        library: Future[Library] | None,
        threads: TorchThreads,
    ) -> tuple[Forward | CompiledDecoder, str]:
        """What runs a batch, and whose code that is (`EngineInfo.steps`)."""
        if self._media is not None:
            return self._pick_media_forward(layout, context_length, options, library, threads)
        try:
            if not options.fused:
                raise UnsupportedModel("fused steps are off")
            parts = PlainDecoder.from_model(self._model, context_length)
            decoder = FusedDecoder(parts)
            self.check(decoder, layout)
            self.check_late(FusedDecoder(parts.without_tables()), layout)
        except Exception as error:  # then the library's code runs it
            own = self._library_decoder(layout)
            self._read_step_model(own, layout, context_length, options)
            best, steps = self.with_cuda_graphs(own, layout, LIBRARY_CODE, options)
            return best, explain_not_compiled(library, steps, error)
        self.step = (parts.step_model, decoder)
        best, steps = self.with_cuda_graphs(decoder, layout, FEW_OPERATIONS, options)
        if library is None:
            return best, steps
        try:
            compiled = compile_decoder(parts, library.result(), threads.large_pass)
            if compiled.layout.layer_shapes != layout.layer_shapes:
                raise UnsupportedModel("its layers differ")
            self.check_compiled(compiled)
        except Exception as error:
            return best, explain_not_compiled(library, steps, error)
        return compiled, COMPILED

    def _read_step_model(
        self, own: LibraryDecoder, layout: TensorLayout, context_length: int, options: EngineOptions
    ) -> None:
        """Before graphs are captured: weights may move. In the exact mode bits must not depend on media in a pass."""
        with_media = self._media is not None
        on_cuda = layout.device.type == "cuda" and layout.dtype == torch.bfloat16
        if not on_cuda or not options.fused or self.rope is not None or (with_media and options.exact):
            return
        try:
            from palaver.engines.torch.step_modules import read_step_model

            base = find_decoder(self._model) if with_media else self._model.model
            found = read_step_model(self._model, base, own, layout, self.ids, context_length)
            self.step = (lambda: found, own)
        except Exception as error:
            _log.info("Decodes without CUDA kernels: %s", error)

    def _pick_media_forward(
        self,
        layout: TensorLayout,
        context_length: int,
        options: EngineOptions,
        library: Future[Library] | None,
        threads: TorchThreads,
    ) -> tuple[Forward | CompiledDecoder, str]:
        """In the exact mode the library's code computes text, too: bits must not depend on media in the same pass."""
        own = self._library_decoder(layout)
        not_compiled: Exception = UnsupportedModel("compiled steps are off")
        if library is not None:
            try:
                return self._compile_with_media(own, layout, context_length, library.result(), threads), COMPILED
            except Exception as error:
                not_compiled = error
        forward: LibraryDecoder | TextAndMediaDecoder = own
        steps = LIBRARY_CODE
        try:
            if not options.fused or options.exact or self.rope is not None:
                raise UnsupportedModel("fused steps are off, or can't be used in the exact mode or with LongRoPE")
            parts = PlainDecoder.from_model(self._model, context_length, find_decoder(self._model))
            both = TextAndMediaDecoder(FusedDecoder(parts), own)
            for computes in (both, both.alternating()):
                self.check(computes, layout)
            self.check_late(FusedDecoder(parts.without_tables()), layout)
            forward, steps = both, FEW_OPERATIONS
            self.step = (parts.step_model, both)
        except Exception:  # then the library's code computes text, too
            own.interleaves = False
            self._read_step_model(own, layout, context_length, options)
        best, steps = self.with_cuda_graphs(forward, layout, steps, options)
        return best, explain_not_compiled(library, steps, not_compiled)

    def _compile_with_media(
        self, own: LibraryDecoder, layout: TensorLayout, context_length: int, library: Library, threads: TorchThreads
    ) -> CompiledDecoder:
        """Raises UnsupportedModel where compiled steps can't compute this model with its media."""
        if self.rope is not None:
            raise UnsupportedModel("it has angles that depend on the length")
        assert self._media is not None
        parts = PlainDecoder.from_model(self._model, context_length, find_decoder(self._model))
        compiled = compile_decoder(parts, library, threads.large_pass)
        if compiled.layout.layer_shapes != layout.layer_shapes:
            raise UnsupportedModel("its layers differ")
        self.check_compiled(compiled)
        self.rotations = check_compiled_media(self, compiled, own, layout, self._media, parts.embedding)
        return compiled

    def pick_exact_passes(
        self, forward: Forward, layout: TensorLayout, exact: bool, threads: TorchThreads
    ) -> tuple[ExactPasses | None, str]:
        """The passes of the exact mode, if it is on, and what the bits of a reply depend on."""
        if not exact:
            return None, BY_BATCH
        experts = any("expert" in name for name, _ in self._model.named_modules())
        quantised = bool(quantization_config(self._model.config.to_dict()))
        with threads.applied():
            return probe_exactness(forward, layout, self.ids, may_pack=not (experts or quantised))

    def _library_decoder(self, layout: TensorLayout) -> LibraryDecoder:
        self._expected_late()  # before its attention is replaced
        forward = LibraryDecoder(self._model, self.rope, self._media)
        try:
            forward.attach()
            self.check(forward, layout)
            self.check_late(forward, layout)
        except BaseException:
            forward.detach()
            raise
        return forward

    def check_late(self, forward: Forward, layout: TensorLayout) -> None:
        """Raises unless a sequence at the end of the context, with another at its start, gives the model's own logits:
        what depends on the position, or on the length of a pass, shows only there."""
        if self._late_start == 0:
            return
        expected = self._expected_late()
        slots = SlotAllocator(layout, PROBE_BYTES)
        late, early = slots.allocate(LENGTH), slots.allocate(LENGTH)
        half = LATE // 2
        long_rope = self.rope is not None and self._late_start + LATE > self.rope.original_length
        prompts = [sequence_chunk(late, 0, self.ids[:half], long_rope), sequence_chunk(early, 0, self.ids[:3])]
        self._compare_late(forward, prompts, expected)
        tokens = [sequence_chunk(late, half, self.ids[half : half + 1], long_rope), self._next_token(early, 3)]
        self._compare_late(forward, tokens, expected)

    def _compare_late(self, forward: Forward, chunks: Sequence[SequenceChunk], expected: Tensor) -> None:
        """The first of the two chunks is the late one. They share a pass, unless their frequencies differ."""
        late, early = chunks
        passes = [[late], [early]] if late.long_rope else [[late, early]]
        batches = [build_batch(chunks, expected.device) for chunks in passes]
        rows = torch.cat([forward(_shift_positions(batch, late.slot, self._late_start)) for batch in batches])
        self.compare_with(rows[0], expected[late.start + len(late.ids) - 1])
        self.compare(rows[1], early.start + len(early.ids))

    def _expected_late(self) -> Tensor:
        """The model's own logits for the text at late positions."""
        if self._late_logits is None:
            ids = torch.tensor([self.ids[:LATE]], device=self._model.device)
            positions = torch.arange(self._late_start, self._late_start + LATE, device=ids.device)[None]
            cache = OffsetCache(self._late_start)
            out = self._model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
            self._late_logits = out.logits[0]
        assert self._late_logits is not None
        return self._late_logits

    def _depends_on_pass_length(self) -> bool:
        """Whether the logits of the first tokens of a pass depend on the position of its last ones."""
        if self._late_start == 0:
            return False
        positions = [0, 1, 2, *range(self._late_start, self._late_start + LATE - 3)]
        ids = torch.tensor([self.ids[:LATE]], device=self._model.device)
        position_ids = torch.tensor([positions], device=ids.device)
        cache = DynamicCache()
        try:
            out = self._model(input_ids=ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
            self.compare(out.logits[0][2], 3)
        except UnsupportedModel:
            return True
        except Exception:  # the model takes no positions
            return False
        return False

    def pick_snapshot_runner(
        self, cache_bytes: int, context_length: int, threads: TorchThreads, reason: str, exact: bool
    ) -> tuple[HybridRunner | SnapshotRunner, str]:
        """A runner for a model whose cache can't be cut at a token: with batches, else on the model's own cache, as far
        as that is correct, at worst without one. And whose code computes its steps, with the reason where there are no
        batches. `reason`: why TorchRunner can't run it."""
        depends_on_length = self._depends_on_pass_length()
        cached = not depends_on_length and self._is_cache_correct([FIRST, 1, 1, 1])
        steps = LIBRARY_CODE
        if not exact:
            try:
                if depends_on_length or self.rope is not None:
                    raise UnsupportedModel("it has angles that depend on the length")
                decoder, chunks = self._hybrid_decoder(cached, reason)
                steps = LIBRARY_AND_KERNELS if decoder.uses_kernels else steps
                steps = f"{steps}, recorded" if decoder.uses_graphs else steps
                return HybridRunner(decoder, cache_bytes, context_length, threads, chunks, self._media), steps
            except Exception as error:
                steps = f"{steps}, one reply at a time: {failure_reason(error)}"
        if cached:
            copies = self._is_cache_correct([FIRST, 1, 1], copying=True)
            chunks = self._is_cache_correct([FIRST, 5, 1, SECOND - FIRST])
            abilities = CacheAbilities(chunks=chunks, copies=copies, reason=reason)
        else:
            abilities = CacheAbilities(copies=False, reason=reason)
        new_state = RecurrentState if cached else StatelessModel
        runner = SnapshotRunner(lambda: new_state(self._model, self._media), cache_bytes, abilities, exact, self._media)
        return runner, steps

    def _hybrid_decoder(self, cached: bool, reason: str) -> tuple[HybridDecoder, bool]:
        """What computes batches of replies, and whether it can compute a prompt in chunks. Raises UnsupportedModel.
        `cached`: whether the model's own cache is correct."""
        layout = hybrid_layout(self._model, torch.tensor(self.ids[:4], device=self._model.device))
        if not layout.states:
            raise UnsupportedModel(reason)
        alone = [self._decode_alone(length) if cached else {} for length in _HYBRID_PROMPTS]
        decoder = HybridDecoder(self._model, layout, self._media)
        try:
            decoder.attach()
            for kernels, graphs, chunks in _HYBRID_WAYS:
                try:
                    self._try_hybrid(decoder, alone, kernels, graphs, chunks)
                    return decoder, chunks
                except Exception as error:
                    _log.info("A hybrid model does without kernels, graphs or chunks: %s", failure_reason(error))
            self._try_hybrid(decoder, alone, kernels=False, graphs=False, chunks=False)
            return decoder, False
        except BaseException:
            decoder.detach()
            raise

    def _try_hybrid(
        self, decoder: HybridDecoder, alone: Sequence[dict[int, Tensor]], kernels: bool, graphs: bool, chunks: bool
    ) -> None:
        """As `_check_hybrid`. `kernels`: whether they compute layers, which they do less precisely than float32.
        `graphs`: whether decode passes are captured."""
        decoder.drop_graphs()
        decoder.drop_kernels()
        if (kernels or graphs) and decoder.device.type != "cuda":
            raise UnsupportedModel("there are neither kernels nor graphs")
        if kernels:
            if decoder.dtype == torch.float32:
                raise UnsupportedModel("the kernels are for narrow floats")
            decoder.use_kernels()
        if graphs:
            decoder.use_graphs(CudaGraphCapture(decoder.device))
        self._check_hybrid(decoder, alone, chunks)

    def _decode_alone(self, prompt: int) -> dict[int, Tensor]:
        """The model's own logits after a prompt of so many tokens and after each of the tokens that follow it, by the
        number of tokens. A model's code for single tokens may be less precise than that for many."""
        state = RecurrentState(self._model)
        logits = {prompt: state.feed(self.ids[:prompt])}
        for length in range(prompt, prompt + 8):
            logits[length + 1] = state.feed(self.ids[length : length + 1])
        return logits

    def _check_hybrid(self, decoder: HybridDecoder, alone: Sequence[dict[int, Tensor]], chunks: bool) -> None:
        """Raises UnsupportedModel unless sequences of different lengths, which join and leave, have the logits that
        each of them has alone; in all passes over several tokens, and where `alone` has none, those of one pass.
        `chunks`: whether a prompt is computed in several passes."""
        slots, states = SlotAllocator(decoder.layout.kv, PROBE_BYTES), decoder.states
        longer, shorter, late = (slots.allocate(LENGTH) for _ in _HYBRID_PROMPTS)
        expected = dict(zip((longer, shorter, late), alone, strict=True))
        lengths = dict.fromkeys(expected, 0)

        def run(*parts: tuple[Slot[Tensor], int]) -> None:
            pieces = [sequence_chunk(slot, lengths[slot], self.ids[lengths[slot] :][:count]) for slot, count in parts]
            for row, (slot, count) in zip(decoder(build_batch(pieces, decoder.device)), parts, strict=True):
                lengths[slot] += count
                self.compare_with(row, expected[slot].get(lengths[slot], self._expected[lengths[slot] - 1]))

        states.clear()
        states.resize(len(lengths))
        for slot, prompt in zip(lengths, _HYBRID_PROMPTS, strict=True):
            states.add(slot)
            for count in (3, prompt - 3) if chunks else (prompt,):
                run((slot, count))
            if slot is shorter:
                run((shorter, 1), (longer, 1))
        run((late, 1), (shorter, 1), (longer, 1))
        left = states.snapshot(longer)
        states.remove(longer)
        run((shorter, 1), (late, 1))
        states.add(longer, left)
        run((longer, 1), (late, 1))
        run((shorter, 1), (longer, 1), (late, 1))
        run((longer, 1))
        states.clear()

    def _measure_rounding(self) -> float:
        """The largest difference of the model's own logits where only rounding differs: in chunks, and with eager
        attention or, if that is its only one, after a change of its input in the last place. It is large where
        activations are quantised, or where rounding decides which experts are routed to."""
        eager = self._model.config._attn_implementation == "eager"
        other = self._with_perturbed_input() if eager else self._with_eager_attention()
        return max(*_until_error(self._in_chunks()), *_until_error(other))

    def _in_chunks(self) -> Iterator[float]:
        state, at = RecurrentState(self._model), 0
        for size in (4, FIRST - 4, 1, 1, SECOND - FIRST - 2, 1, 1, 1):
            at += size
            yield max_difference(state.feed(self.ids[at - size : at]), self._expected[at - 1])

    def _with_eager_attention(self) -> Iterator[float]:
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")
        try:
            yield max_difference(self._model(input_ids=self._batch).logits[0], self._expected)
        finally:
            self._model.set_attn_implementation(before)

    def _with_perturbed_input(self) -> Iterator[float]:
        embedded = self._model.get_input_embeddings()(self._batch)
        signs = (torch.arange(embedded.numel(), device=embedded.device) * 7919 // 64 % 2).view_as(embedded) * 2 - 1
        perturbed = embedded + embedded * signs * torch.finfo(embedded.dtype).eps
        yield max_difference(self._model(inputs_embeds=perturbed.to(embedded.dtype)).logits[0], self._expected)

    def _is_cache_correct(self, chunk_sizes: Sequence[int], copying: bool = False) -> bool:
        try:
            self._check_cache(chunk_sizes, copying)
        except Exception:  # a trial that raises is a no
            return False
        return True

    def _check_cache(self, chunk_sizes: Sequence[int], copying: bool) -> None:
        state, at = RecurrentState(self._model), 0
        for size in chunk_sizes:
            if copying:
                state.copy().feed([1])  # must not change the original
                state = state.copy()
            at += size
            self.compare(state.feed(self.ids[at - size : at]), at)


_HYBRID_WAYS = ((True, True, True), (False, True, True), (False, True, False), (False, False, True))
"""Whether a hybrid model runs with kernels, with graphs, and its prompts in chunks: the fastest first."""
_HYBRID_PROMPTS = (FIRST, 7, 11)
"""Tokens of the prompts in the probe of batches with recurrent states."""


def _until_error(trial: Iterator[float]) -> Iterator[float]:
    """0 and what the trial yields; not every model can be run in every way."""
    yield 0.0
    with suppress(Exception):
        yield from trial


def _shift_positions(batch: ForwardBatch, slot: Slot[Tensor], offset: int) -> ForwardBatch:
    """The batch with later positions for the tokens of this slot; where they are stored doesn't change."""
    offsets = [offset if chunk.slot is slot else 0 for chunk in batch.chunks for _ in chunk.ids]
    positions = [at + shift for at, shift in zip(batch.positions.tolist(), offsets, strict=True)]
    inputs = BatchInputs(batch.ids.tolist(), positions, batch.ids.device)
    return replace(batch, inputs=inputs, max_position=max(positions))
