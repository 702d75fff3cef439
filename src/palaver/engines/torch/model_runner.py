"""The runner for models with a key and a value for each token: prefixes are reused to the token, and all sequences
share a pass.

In the exact mode all passes have one shape, in which a token's bits don't depend on the other rows of the batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.engines.core.kv_cache import Slot, SlotAllocator
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.request import SequenceState, align_chunk
from palaver.engines.core.runner import SlotRunner, UnsupportedModel
from palaver.engines.core.sampler import Logits
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.torch.batch import (
    ForwardBatch,
    SequenceChunk,
    build_batch,
    build_block_batch,
    build_draft_batch,
    sequence_chunk,
)
from palaver.engines.torch.device_sampler import DeviceSampler
from palaver.engines.torch.devices import TensorLayout, TorchThreads, is_out_of_memory
from palaver.errors import UnsupportedContent
from palaver.memory import give_back_unused

if TYPE_CHECKING:  # it imports transformers, which plain decoders do without
    from palaver.engines.torch.media import MediaEncoder, SequenceMedia
    from palaver.engines.torch.step_weights import StepModel

_log = logging.getLogger(__name__)

EXACT_CHUNK = 128
"""Prompt tokens of a sequence that a scheduler step computes in the exact mode."""
ROWS = {"cpu": 16}
"""Rows of every pass, by device type. On accelerators more rows cost next to nothing."""
DEFAULT_ROWS = 128

PROMPT_TOKENS = 20
"""Tokens of the probe's prompt."""
PROBE_BYTES = 1 << 24


class ExactPasses:
    """The exact mode: computes tokens in passes of one shape.

    How a matrix product rounds depends on its number of rows, and which numbers of rows round alike depends on the
    processor and the library. So every pass has the same number of rows, padded where there are fewer tokens, and
    attention is computed for aligned blocks of positions: the shape of a token's call depends only on its position.
    What that achieves for a model on a machine is probed when the model is loaded.

    `packs`: sequences share a pass, which is right where a row's bits depend neither on its index nor on other rows.
    Otherwise each sequence has a pass of its own, in which a token's row is decided by its position.
    """

    def __init__(self, forward: Callable[[ForwardBatch], Tensor], device: torch.device, packs: bool) -> None:
        self._forward = forward
        self._device = device
        self.packs = packs
        self.rows = ROWS.get(device.type, DEFAULT_ROWS)

    def run(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        """The logits after the last token of each sequence; undefined without `need_logits`."""
        single_tokens = all(len(chunk.ids) == 1 for chunk in chunks)
        size = self.rows if self.packs and single_tokens else 1
        return torch.cat([self._run_group(chunks[i : i + size], need_logits) for i in range(0, len(chunks), size)])

    def _run_group(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        if len(chunks) > 1:
            return self._run_pass(chunks, need_logits)
        blocks = list(_split_into_blocks(chunks[0], self.rows))
        for block in blocks[:-1]:
            self._run_pass([block], False)
        return self._run_pass(blocks[-1:], need_logits)

    def _run_pass(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        padding = 0 if self.packs else chunks[0].start % self.rows
        logits = self._forward(build_block_batch(chunks, self.rows, padding, self._device, need_logits))
        if not need_logits:
            return logits[:0]
        end = padding + sum(len(chunk.ids) for chunk in chunks)
        return logits[padding:end] if len(chunks) > 1 else logits[end - 1 : end]


def _split_into_blocks(chunk: SequenceChunk, size: int) -> list[SequenceChunk]:
    """The same tokens, split at multiples of the size."""
    stop = chunk.start + len(chunk.ids)
    starts = [chunk.start, *range(chunk.start - chunk.start % size + size, stop, size)]
    ends = [*starts[1:], stop]
    return [
        replace(chunk, start=start, ids=chunk.ids[start - chunk.start : end - chunk.start])
        for start, end in zip(starts, ends, strict=True)
    ]


def probe_exactness(
    forward: Callable[[ForwardBatch], Tensor], layout: TensorLayout, ids: Sequence[int], may_pack: bool
) -> tuple[ExactPasses, str]:
    """The fastest passes with the strongest guarantee, and what the bits of a reply depend on with them.

    `may_pack`: False for models that treat a row depending on the others, such as mixtures of experts.
    """
    for packs in (True, False) if may_pack else (False,):
        passes = ExactPasses(forward, layout.device, packs)
        if _Trial(passes, layout, ids).depends_on_text_alone():
            return passes, BY_TEXT if may_pack else BY_CACHE
    passes = ExactPasses(forward, layout.device, False)
    return passes, BY_CACHE if _Trial(passes, layout, ids).is_repeatable() else BY_BATCH


class _Trial:
    """Compares the logits of one text, computed alone in one chunk, with those in several chunks and in a batch."""

    def __init__(self, passes: ExactPasses, layout: TensorLayout, ids: Sequence[int]) -> None:
        self._passes = passes
        self._slots = SlotAllocator(layout, PROBE_BYTES)
        self._ids = ids
        self._alone = self._decode([self._prefill([PROMPT_TOKENS])])[0]

    def depends_on_text_alone(self) -> bool:
        in_chunks = self._prefill([7, 11, *[1] * (PROMPT_TOKENS - 18)])
        return self._is_same_in_batch(in_chunks)

    def is_repeatable(self) -> bool:
        return self._is_same_in_batch(self._prefill([PROMPT_TOKENS]))

    def _is_same_in_batch(self, sequence: tuple[Slot[Tensor], int]) -> bool:
        others = [self._prefill([3]), self._prefill([1, 17])]
        return torch.equal(self._decode([others[0], sequence, others[1]])[1], self._alone)

    def _prefill(self, chunk_sizes: Sequence[int]) -> tuple[Slot[Tensor], int]:
        """A slot with the start of the text, computed in chunks of these sizes, and its length."""
        slot, at = self._slots.allocate(len(self._ids)), 0
        for size in chunk_sizes:
            self._passes.run([sequence_chunk(slot, at, self._ids[at : at + size])], False)
            at += size
        return slot, at

    def _decode(self, sequences: Sequence[tuple[Slot[Tensor], int]]) -> Tensor:
        return self._passes.run([sequence_chunk(slot, at, self._ids[at : at + 1]) for slot, at in sequences], True)


SCORE_BYTES = {"cpu": 256 << 20}
"""What the scores of a pass may take, by device type."""
DEFAULT_SCORE_BYTES = 1 << 30


class Forward(Protocol):
    """Runs a batch: the logits after each sequence's last token."""

    def __call__(self, batch: ForwardBatch) -> Tensor: ...

    @property
    def pair_bytes(self) -> int:
        """The memory that attention takes for each pair of a query and a key, in a prefill."""
        ...


class TorchRunner(SlotRunner[Tensor]):
    on_idle: Callable[[], bool] | None = None
    """As in `Worker`."""

    def __init__(
        self,
        forward: Forward,
        layout: TensorLayout,
        cache_bytes: int,
        context_length: int,
        threads: TorchThreads,
        exact: ExactPasses | None = None,
        original_length: int | None = None,
        run_ahead: bool | None = None,
        media: MediaEncoder | None = None,
        drafts: bool = False,
    ) -> None:
        """`original_length`: longer sequences use other rotary frequencies (`LongRope`). `run_ahead`: by
        default on CUDA; never in the exact mode. `drafts`: whether they are verified, up to rounding."""
        super().__init__(layout, cache_bytes, context_length)
        self.prefills_last_token = layout.device.type == "cpu" and exact is None
        on_cuda = layout.device.type == "cuda"
        if exact is None and (on_cuda if run_ahead is None else run_ahead):
            self.run_ahead = self._run_ahead
        if drafts and exact is None:
            self.verify_drafts = self._verify_drafts
        self.uses_device = on_cuda or self.run_ahead is not None
        self._forward = forward
        self._device = layout.device
        self._sampler = DeviceSampler(layout.device, on_cuda or self.run_ahead is not None)
        self._threads = threads
        self._exact = exact
        self._original_length = original_length
        self._long_rope: set[SequenceState] = set()
        """The sequences that started with the frequencies for long texts."""
        self._encoder = media
        self._media: dict[SequenceState, SequenceMedia] = {}
        """The sequences with pictures or sounds."""
        self._decode_batch: ForwardBatch | None = None
        """The last decode batch, which the next pass of the same sequences reuses."""
        self._max_pairs = SCORE_BYTES.get(layout.device.type, DEFAULT_SCORE_BYTES) // max(1, forward.pair_bytes)
        """Pairs of a query and a key in a prefill pass."""

    def max_chunk(self, sequence: SequenceState) -> int | None:
        """In the exact mode the chunk size must not depend on other sequences."""
        return None if self._exact is None else EXACT_CHUNK

    def allocate(self, sequence: SequenceState) -> None:
        super().allocate(sequence)
        if self._is_long(sequence):
            self._long_rope.add(sequence)
        if sequence.generation.prompt.media:
            try:
                self._attach_media(sequence)
            except BaseException:
                self.release(sequence)
                raise

    def _attach_media(self, sequence: SequenceState) -> None:
        assert self._encoder is not None, "media are refused by models that don't take them"
        self._media[sequence] = self._encoder.attach(sequence)
        if self._exact is not None and sequence.unsplit:
            raise UnsupportedContent("In the exact mode this model takes text only: pictures are computed whole.")

    def needs_recompute(self, sequence: SequenceState) -> bool:
        """As the library's `generate`, which computes all keys again at the first token beyond the original length."""
        return self._is_long(sequence) and sequence not in self._long_rope

    def release(self, sequence: SequenceState) -> None:
        try:
            super().release(sequence)
        finally:
            self._long_rope.discard(sequence)
            self._media.pop(sequence, None)

    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> Logits:
        chunks = [self._next_chunk(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        return self._sampler.logits(self._run_by_frequencies(chunks, need_logits))

    def _run_ahead(
        self, sequences: Sequence[SequenceState], tokens: object, prompts: Sequence[tuple[SequenceState, int]] = ()
    ) -> Logits | None:
        assert not prompts, "they have passes of their own"
        if len({sequence in self._long_rope for sequence in sequences}) > 1:
            return None
        assert isinstance(tokens, Tensor)
        self._grow_slots(sequences, [1] * len(sequences))
        batch = self._next_batch([self._chunk_ahead(sequence) for sequence in sequences], True, tokens)
        logits = self._sampler.logits(self._run_batch(batch))
        for sequence in sequences:
            sequence.computed_tokens += 1
        return logits

    def _verify_drafts(self, sequences: Sequence[SequenceState], drafts: Sequence[Sequence[int]]) -> Logits:
        if len({sequence in self._long_rope for sequence in sequences}) > 1:
            raise UnsupportedModel("sequences of different frequencies don't share a pass")
        self._grow_slots(sequences, [1 + len(draft) for draft in drafts])
        pairs = zip(sequences, drafts, strict=True)
        chunks = [self._chunk(sequence, (sequence.token_ids[-1], *draft)) for sequence, draft in pairs]
        batch = build_draft_batch(chunks, self._device)
        with self._threads.scaled_for(batch.ids.shape[0] * batch.max_position):
            logits = self._sampler.logits(self._run_batch(batch))
        for sequence in sequences:
            sequence.computed_tokens += 1
        return logits

    def _drop_decode_batch(self) -> None:
        self._decode_batch = None

    def _next_chunk(self, sequence: SequenceState, count: int) -> SequenceChunk:
        start = sequence.computed_tokens
        ids = sequence.token_ids[start : start + count]
        return self._chunk(sequence, ids)

    def _chunk_ahead(self, sequence: SequenceState) -> SequenceChunk:
        """The chunk of a token that the host doesn't know yet."""
        return self._chunk(sequence, (0,))

    def _chunk(self, sequence: SequenceState, ids: Sequence[int]) -> SequenceChunk:
        slot, start, long_rope = self._slots[sequence], sequence.computed_tokens, sequence in self._long_rope
        media = self._media.get(sequence)
        if media is None or start < media.end:
            return sequence_chunk(slot, start, ids, long_rope, media)
        return sequence_chunk(slot, start, ids, long_rope, rotary_shift=media.shift)

    def _is_long(self, sequence: SequenceState) -> bool:
        return self._original_length is not None and len(sequence.token_ids) > self._original_length

    def _namespace(self, sequence: SequenceState) -> Hashable:
        """Keys of different frequencies are not interchangeable."""
        return (sequence.space, "long") if sequence in self._long_rope else sequence.space

    def _new_namespace(self, sequence: SequenceState) -> Hashable:
        return (sequence.space, "long") if self._is_long(sequence) else sequence.space

    def _run_by_frequencies(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        """Sequences of different frequencies don't share a pass."""
        groups = [[i for i, chunk in enumerate(chunks) if chunk.long_rope is long_rope] for long_rope in (False, True)]
        outs = [self._run_chunks([chunks[i] for i in group], need_logits) for group in groups if group]
        if len(outs) == 1:
            return outs[0]
        order = torch.tensor([*groups[0], *groups[1]], device=self._device).argsort()
        return torch.cat(outs)[order] if need_logits else outs[0]

    def _run_chunks(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        """Runs one batch, or several smaller ones where the attention scores of one take too much memory."""
        if self._exact is not None:
            began = time.thread_time()
            logits = self._exact.run(chunks, need_logits)
            self.forward_seconds += time.thread_time() - began
            return logits
        prefills = any(_half(chunk) for chunk in chunks)
        if prefills and _count_pairs(chunks) > self._max_pairs:
            return self._run_halves(chunks, need_logits)
        try:
            batch = self._next_batch(chunks, need_logits)
            with self._threads.scaled_for(batch.ids.shape[0] * batch.max_position):
                return self._run_batch(batch)
        except (RuntimeError, MemoryError) as error:
            if not prefills or not is_out_of_memory(error):
                raise
        self._max_pairs = _count_pairs(chunks) // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        give_back_unused()
        return self._run_halves(chunks, need_logits)

    def _run_halves(self, chunks: Sequence[SequenceChunk], need_logits: bool) -> Tensor:
        """Runs the first half of each chunk, then the second halves with the single tokens."""
        halves = [_half(chunk) for chunk in chunks]
        pairs = list(zip(chunks, halves, strict=True))
        self._run_chunks([replace(chunk, ids=chunk.ids[:half]) for chunk, half in pairs if half], False)
        rest = [replace(chunk, start=chunk.start + half, ids=chunk.ids[half:]) for chunk, half in pairs]
        return self._run_chunks(rest, need_logits)

    def _next_batch(
        self, chunks: Sequence[SequenceChunk], need_logits: bool, tokens: Tensor | None = None
    ) -> ForwardBatch:
        """Advances the last decode batch where the same sequences continue. Prefill passes in between leave it."""
        if need_logits and self._decode_batch is not None and self._decode_batch.can_advance_to(chunks):
            self._decode_batch.advance(chunks, tokens)
            return self._decode_batch
        batch = build_batch(chunks, self._device, need_logits)
        if tokens is not None:
            batch.set_tokens(tokens)
        if batch.is_decode:
            self._decode_batch = batch
        return batch

    def _run_batch(self, batch: ForwardBatch) -> Tensor:
        began = time.thread_time()
        logits = self._forward(batch)
        self.forward_seconds += time.thread_time() - began
        return logits


def pick_step_runner(
    read: Callable[[], StepModel],
    forward: Forward,
    layout: TensorLayout,
    cache_bytes: int,
    context_length: int,
    threads: TorchThreads,
    options: EngineOptions,
    ids: Sequence[int],
    media: MediaEncoder | None = None,
    long_prompts: bool = True,
) -> tuple[TorchRunner, str] | None:
    """The runner with our own CUDA kernels, and what the bits of a reply depend on; None where they don't run the
    model: without Triton, on other devices and in other dtypes, for sizes that they don't know, or where the exact mode
    is wanted and their bits depend on the batch.

    `read` reads the weights as the kernels do. `forward` computes what they don't; with `long_prompts` those too."""
    if layout.device.type != "cuda" or layout.dtype != torch.bfloat16 or not options.fused:
        return None
    try:
        from palaver.engines.torch.step_runner import StepRunner, build_step
        from palaver.engines.torch.tile_timer import search_tiles

        parts = read()
        limits = options.limits or SchedulerLimits()
        max_rows = limits.max_running if options.max_running is None else options.max_running
        step, exactness, verifies = build_step(parts, layout, forward, max_rows, options.exact, ids, options.drafts)
    except Exception as error:
        _log.info("Decodes without CUDA kernels: %s", error)
        return None
    if options.exact and exactness != BY_TEXT:
        return None
    settings: dict[str, Any] = {"run_ahead": options.run_ahead, "media": media, "long_prompts": long_prompts}
    settings["speculate"] = verifies
    runner = StepRunner(step, forward, layout, cache_bytes, context_length, threads, **settings)
    if options.search_tiles:
        runner.on_idle = search_tiles(step).advance
    return runner, exactness


def _half(chunk: SequenceChunk) -> int:
    """Where a chunk may be split; 0 if it may not."""
    half = len(chunk.ids) // 2
    if chunk.media is None:
        return half
    stop = chunk.start + len(chunk.ids)
    unsplit = [(first, end) for first, end in chunk.media.unsplit if first < stop and end > chunk.start]
    aligned = align_chunk(chunk.start, half, unsplit)
    return aligned if aligned < len(chunk.ids) else 0


def _count_pairs(chunks: Sequence[SequenceChunk]) -> int:
    return sum(len(chunk.ids) * (chunk.start + len(chunk.ids)) for chunk in chunks)
