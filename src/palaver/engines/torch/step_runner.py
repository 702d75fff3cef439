"""The runner of decoders on CUDA: decodes by `DecoderStep`, which samples, too. Prompts are computed by the same
kernels; only the later parts of very long ones of plain decoders, outside of the exact mode, by torch's operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.base import BY_BATCH, BY_TEXT
from palaver.engines.core.kv_cache import Slot, SlotAllocator
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.core.sampler import Logits, NextPass, SampledStep
from palaver.engines.core.speculation import MAX_ROWS
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.cuda_graphs import CudaGraphCapture
from palaver.engines.torch.cuda_step import SHORT_CHUNK, DecoderStep, PromptLoad, StepRow
from palaver.engines.torch.device_changes import TooManyEdits, to_device
from palaver.engines.torch.device_sampler import DeviceLogits, DeviceSampler, start_copy, steps_from_results
from palaver.engines.torch.devices import TensorLayout, TorchThreads
from palaver.engines.torch.model_runner import Forward, TorchRunner
from palaver.engines.torch.step_weights import StepModel
from palaver.engines.torch.tile_timer import with_known_tiles
from palaver.sampling import Sampling

PROBE_TOKENS = 150
"""Tokens of the text that a step is probed with: more than two tiles of attention."""
PROBE_BYTES = 1 << 24
MAX_ERROR = 0.1
"""By how much the logits of two ways to compute them may differ, relative to their size. Rounding in bfloat16 comes to
a few hundredths in deep models, and a wrong kernel to more than 1."""
MAX_EXPERT_ERROR = 0.5
"""The same for mixtures of experts, where rounding decides between experts: of a random Qwen3-MoE with 4 layers the
library's logits in bfloat16 were 0.23 from those in float32, the kernels' 0.006."""
SHORT_PROMPT, SHORT_TEXT = 1024, 8192
"""Torch's operations compute more tokens of prompts than this in a pass, if so many come before them: there their
attention is quicker than the kernels', and their products are slower."""
MAX_DELAY_S = 0.01
"""By how much a chunk of prompts may delay the next tokens of the replies in the same pass."""
GREEDY = Sampling(temperature=0)


class SampledRows(NamedTuple):
    """Tokens that are still on the device: those that the last step sampled in these rows."""

    rows: Sequence[int]
    in_order: bool
    """Whether these are all rows of the step."""


class SampledLogits:
    """The logits of a step that has sampled, by the settings of the replies alone. Where a reply now wants something
    else, such as a mask, the rows are sampled again."""

    def __init__(
        self,
        tensor: Tensor,
        sampler: DeviceSampler,
        results: Callable[[], NDArray[np.float64]],
        rows: Sequence[int],
        sample_again: Callable[[Sequence[LogitsProcessor | None]], Tensor],
    ) -> None:
        """`rows` of the tensor and of the results. `sample_again`: with the options of all rows of the step, None for
        those that don't matter; the step goes on with these tokens."""
        self._tensor = tensor
        self._sampler = sampler
        self._results = results
        self._rows = rows
        self._sample_again = sample_again

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> DeviceLogits:
        at = self._rows[index]
        return DeviceLogits(self._tensor[at : at + 1], self._sampler)

    def select(self, rows: Sequence[int]) -> SampledLogits:
        own = [self._rows[row] for row in rows]
        return SampledLogits(self._tensor, self._sampler, self._results, own, self._sample_again)

    def joined(self, others: Sequence[Logits]) -> DeviceLogits:
        return self.copy().joined(others)

    def copy(self) -> DeviceLogits:
        return DeviceLogits(self._copy_rows(), self._sampler)

    @property
    def nbytes(self) -> int:
        return len(self._rows) * self._tensor[:1].nbytes

    def sample_ahead(self, row: int, count: int, processor: LogitsProcessor) -> Sequence[SampledStep | None]:
        return ()

    def sample(self, processors: Sequence[LogitsProcessor], next_pass: NextPass | None = None) -> list[SampledStep]:
        results = self._results
        if not all(map(self._is_decided, processors)):
            everyone: list[LogitsProcessor | None] = [None] * len(self._tensor)
            for row, processor in zip(self._rows, processors, strict=True):
                everyone[row] = processor
            try:
                results = start_copy(self._sample_again(everyone))
            except TooManyEdits:
                return self.copy().sample(processors, next_pass)
        in_order = self._in_order
        if next_pass is not None:
            next_pass.start(SampledRows(self._rows, in_order))
        table = results()
        table = table if in_order else table[list(self._rows)]
        return steps_from_results(table, self._gather, processors, self._sampler, next_pass)

    def _is_decided(self, processor: LogitsProcessor) -> bool:
        """Whether the step has sampled the next token, from the logits and the settings that it knows."""
        kernels = self._sampler.kernels
        free = not processor.is_active and processor.reply.forced_id is None
        return free and (kernels is None or not kernels.needs_filters(processor))

    @property
    def _in_order(self) -> bool:
        """Whether these are all rows."""
        everything = range(len(self._tensor))
        return self._rows == everything or list(self._rows) == list(everything)

    def _copy_rows(self) -> Tensor:
        if self._in_order:
            return self._tensor.clone(memory_format=torch.contiguous_format)
        return self._gather(range(len(self._rows)))

    def _gather(self, rows: Sequence[int]) -> Tensor:
        """Copies of these rows. The next step may run: it writes its logits elsewhere."""
        own = [self._rows[row] for row in rows]
        return self._tensor[to_device(np.array(own), self._tensor.device)]


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
        speculate: bool = False,
        long_prompts: bool = True,
        **options: Any,
    ) -> None:
        """`forward` computes what the step doesn't: media and, with `long_prompts`, long prompts unless the step is
        exact. `speculate`: whether drafts are verified; the step gives the same bits for any number of rows."""
        super().__init__(forward, layout, cache_bytes, context_length, threads, run_ahead=run_ahead, **options)
        self._step = step
        self._sampler = DeviceSampler(layout.device, True, step.max_rows, step.capture)
        if self._sampler.kernels is not None and step.capture is not None:
            self._sampler.kernels.compile(step.last_logits(1), step.model.vocabulary_size)
        self._repeated: Sequence[SequenceState] = ()
        self._room = 0
        """The sequences of the last step, one a row, and for how many more tokens their slots have room."""
        self.mixed_tokens = self._mixed_tokens
        if self.run_ahead is not None:
            self.resume_cached = self._resume_cached
        if speculate:
            self.verify_drafts = self._verify_drafts
        long_prompts = long_prompts and not step.model.quantized  # which torch's operations unpack more slowly
        self._long_prompts = long_prompts and not step.exact
        """Whether `forward` computes long passes over prompts."""
        self._cache.widens_pools = False  # a step attends for slots wherever they are

    def _mixed_tokens(self, sequences: Sequence[SequenceState], replies: int) -> int:
        """Beside replies as many as delay them by at most MAX_DELAY_S."""
        step = self._step
        if any(map(self._has_media_ahead, sequences)):
            return 0
        if not replies or step.costs is None:
            return step.max_prompt_tokens
        missing = [sequence.prefill_tokens for sequence in sequences if sequence.prefill_tokens]
        start = max((sequence.computed_tokens for sequence in sequences), default=0)
        load = PromptLoad(len(missing), sum(missing), start)
        return step.costs.prompt_tokens(load, replies, MAX_DELAY_S, step.max_rows)

    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> Logits:
        with_media = any(map(self._has_media_ahead, sequences))
        if need_logits and not with_media:
            return self._run_step(sequences, counts)
        if not need_logits and not with_media and not self._is_left_to_torch(sequences, counts):
            chunks = [self._next_chunk(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
            began = time.thread_time()
            self._step.prefill(chunks)
            self.forward_seconds += time.thread_time() - began
            return self._sampler.logits(torch.empty(0, 0, device=self._device))
        return super()._compute(sequences, counts, need_logits)

    def _is_left_to_torch(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> bool:
        """Whether `forward` computes this pass over prompts."""
        start = max(sequence.computed_tokens for sequence in sequences)
        return self._long_prompts and sum(counts) > SHORT_PROMPT and start > SHORT_TEXT

    def _run_ahead(
        self, sequences: Sequence[SequenceState], tokens: object, prompts: Sequence[tuple[SequenceState, int]] = ()
    ) -> Logits | None:
        if not prompts and isinstance(tokens, SampledRows) and tokens.in_order and self._can_repeat(sequences):
            return self._repeat_step(sequences)
        everyone = [*sequences, *(sequence for sequence, _ in prompts)]
        counts = [1] * len(sequences) + [count for _, count in prompts]
        if len(everyone) > self._step.max_rows or any(map(self._has_media_ahead, everyone)):
            return None
        self._grow_slots(everyone, counts)
        if isinstance(tokens, SampledRows):
            sources = tokens.rows
        else:
            assert isinstance(tokens, Tensor)
            self._step.set_tokens(tokens)
            sources = range(len(sequences))
        logits = self._run_step(everyone, counts, sources)
        for sequence, count in zip(everyone, counts, strict=True):
            sequence.computed_tokens += count
        return logits

    def _resume_cached(self, sequences: Sequence[SequenceState], cached: Sequence[Logits]) -> Logits:
        tensors = [logits.tensor for logits in cached if isinstance(logits, DeviceLogits)]
        assert len(tensors) == len(cached), "logits of one runner are of one kind"
        rows = [self._step_row(sequence, self._last_chunk(sequence)) for sequence in sequences]
        logits, results = self._step.resume(rows, tensors)
        self._keep_rows(sequences, rows)
        return SampledLogits(logits, self._sampler, results, range(len(rows)), self._sample_again)

    def _last_chunk(self, sequence: SequenceState) -> SequenceChunk:
        """Of the last token, which is computed."""
        chunk = self._chunk(sequence, sequence.token_ids[-1:])
        return replace(chunk, start=chunk.start - 1)

    def _keep_rows(self, sequences: Sequence[SequenceState], rows: Sequence[StepRow]) -> None:
        """The next step may be of the same rows, which are one a sequence."""
        self._repeated = list(sequences)
        self._room = min(row.chunk.pool.capacity - row.chunk.start - 1 for row in rows)

    def _verify_drafts(self, sequences: Sequence[SequenceState], drafts: Sequence[Sequence[int]]) -> Logits:
        self._grow_slots(sequences, [1 + len(draft) for draft in drafts])
        began = time.thread_time()
        self._room = 0
        rows = [
            self._step_row(sequence, replace(chunk, start=chunk.start + place, ids=(token_id,)))
            for sequence, draft in zip(sequences, drafts, strict=True)
            for chunk in (self._next_chunk(sequence, 1),)
            for place, token_id in enumerate((*chunk.ids, *draft))
        ]
        logits, results = self._step.verify(rows)
        for sequence in sequences:
            sequence.computed_tokens += 1
        self.forward_seconds += time.thread_time() - began
        return SampledLogits(logits, self._sampler, results, range(len(rows)), self._sample_again)

    @staticmethod
    def _step_row(sequence: SequenceState, chunk: SequenceChunk) -> StepRow:
        processor, start = sequence.processor, len(sequence.generation.prompt.context_ids)
        return StepRow(chunk, processor.sampling, processor.uniform_state, start)

    def _can_repeat(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether the last step had these rows, and their slots have room for another token."""
        return self._room > 0 and sequences == self._repeated

    def _repeat_step(self, sequences: Sequence[SequenceState]) -> Logits:
        began = time.thread_time()
        self._room -= 1
        logits, results = self._step.repeat()
        for sequence in sequences:
            sequence.computed_tokens += 1
        self.forward_seconds += time.thread_time() - began
        return SampledLogits(logits, self._sampler, results, range(len(sequences)), self._sample_again)

    def _drop_decode_batch(self) -> None:
        super()._drop_decode_batch()
        self._room = 0

    def _has_media_ahead(self, sequence: SequenceState) -> bool:
        media = self._media.get(sequence)
        return media is not None and sequence.computed_tokens < media.end

    def _run_step(
        self, sequences: Sequence[SequenceState], counts: Sequence[int], sources: Sequence[int] = ()
    ) -> Logits:
        """Computes so many tokens of each sequence. Those that have no others get a row of logits, in order.

        `sources`: for the first sequences, the rows of the last step whose tokens they have.
        """
        began = time.thread_time()
        rows: list[StepRow] = []
        prompts: list[SequenceChunk] = []
        places: list[int] = []
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            if i < len(sources):
                last = self._chunk_ahead(sequence)
            else:
                chunk = self._next_chunk(sequence, count)
                ends = count == sequence.pending_tokens
                if not ends:
                    prompts.append(chunk)
                    places.append(0)
                    continue
                if count > 1:
                    prompts.append(replace(chunk, ids=chunk.ids[:-1]))
                last = replace(chunk, start=chunk.start + count - 1, ids=chunk.ids[-1:])
            places.append(len(rows))
            rows.append(self._step_row(sequence, last))
        if sum(len(chunk.ids) for chunk in prompts) > self._step.max_prompt_tokens:
            self._step.prefill(prompts)
            prompts = []
        known = [-1] * (len(rows) - len(sources))
        logits, results = self._step.run(rows, [*sources, *known] if sources else None, prompts)
        single = len(rows) == len(sequences)
        if single:
            self._keep_rows(sequences, rows)
        else:
            self._room = 0
        self.forward_seconds += time.thread_time() - began
        own = range(len(rows)) if single else places
        return SampledLogits(logits, self._sampler, results, own, self._sample_again)

    def _sample_again(self, processors: Sequence[LogitsProcessor | None]) -> Tensor:
        """Samples all rows of the last step by all options of their replies."""
        if self._sampler.kernels is None:
            raise TooManyEdits
        step, count = self._step, len(processors)
        logits = step.last_logits(count)
        everyone = [*processors, *[None] * (len(logits) - count)]
        return self._sampler.kernels.replay(logits, step.lists, everyone, step.replace_tokens)[:count]


def build_step(
    model: StepModel,
    layout: TensorLayout,
    decoder: Forward,
    max_rows: int,
    exact: bool,
    ids: Sequence[int],
    drafts: bool | None = None,
) -> tuple[DecoderStep, str, bool]:
    """The step of a model, what the bits of a reply depend on with it, and whether it verifies drafts. `drafts`: as in
    `EngineOptions`.

    Raises UnsupportedModel for models and devices that the kernels don't know, and where they don't give the decoder's
    logits."""
    model = with_known_tiles(model)
    newest = torch.cuda.get_device_capability(layout.device) >= (9, 0)
    drafted_rows = MAX_ROWS if drafts or (exact and drafts is None) else 0
    step = DecoderStep(model, exact, CudaGraphCapture(layout.device), max(max_rows, drafted_rows), pdl=newest)
    text = [ids[i % len(ids)] for i in range(PROBE_TOKENS)]
    probe = StepProbe(step, layout, text)
    probe.compare(decoder)
    step.capture_all(drafted_rows)
    if exact and probe.depends_on_text_alone():
        return step, BY_TEXT, bool(drafted_rows) and probe.verifies_drafts()
    return step, BY_BATCH, bool(drafts) and not exact


class StepProbe:
    """Compares the logits after one text with those of a decoder, and with those of the same text in other passes."""

    def __init__(self, step: DecoderStep, layout: TensorLayout, ids: Sequence[int]) -> None:
        self._step = step
        self._layout = layout
        self._slots = SlotAllocator(layout, PROBE_BYTES)
        self._ids = ids

    def compare(self, decoder: Callable[[ForwardBatch], Tensor]) -> None:
        """Raises unless a step after a prompt, the decoder's and the step's own, and a mixed step give the decoder's
        logits, up to rounding."""
        last = len(self._ids) - 1
        slot, other = (self._slots.allocate(len(self._ids) + 1) for _ in range(2))
        for one in (slot, other):
            decoder(build_batch([sequence_chunk(one, 0, self._ids[:last])], self._layout.device, need_logits=False))
        whole = sequence_chunk(other, last, self._ids[last:])
        expected = decoder(build_batch([whole], self._layout.device))[0].float()
        most = MAX_ERROR if self._step.model.experts is None else MAX_EXPERT_ERROR
        for compute in (
            lambda: self._decode([(slot, last)])[0],
            lambda: self._decode([(self._prefill([last]), last)])[0],
            lambda: self._decode_with_prompt([], last // 2)[0],
            lambda: self._decode_with_prompt([], last - SHORT_CHUNK)[0],
        ):
            error = float((compute() - expected).norm() / expected.norm())
            if not error <= most:
                raise UnsupportedModel(f"the kernels' logits differ by {error:.2g} of their length from the decoder's")

    def depends_on_text_alone(self) -> bool:
        """Whether the bits are the same in one chunk and in several, with tokens decoded one by one, beside other
        sequences, and in one pass with the end of the prompt."""
        last = len(self._ids) - 1
        alone = self._decode([(self._prefill([last]), last)])[0].clone()
        in_chunks = self._prefill([7, last - 9, 1, 1])
        others = [(self._prefill([3]), 3), (self._prefill([20]), 20)]
        beside = self._decode([others[0], (in_chunks, last), others[1]])[1].clone()
        with_prompt = self._decode_with_prompt(others[:1], last // 2)[1].clone()
        with_its_end = self._decode_with_prompt(others[:1], last - SHORT_CHUNK)[1]
        return all(torch.equal(alone, other) for other in (beside, with_prompt, with_its_end))

    def verifies_drafts(self) -> bool:
        """Whether tokens of one text have the bits in one step that they have one by one."""
        last = len(self._ids) - 1
        alone = self._decode([(self._prefill([last]), last)])[0].clone()
        drafted = self._prefill([last - 5])
        return torch.equal(
            alone, self._step.verify([self._row(drafted, at) for at in range(last - 5, last + 1)])[0][-1]
        )

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
        return self._step.run([self._row(slot, at) for slot, at in sequences])[0]

    def _decode_with_prompt(self, others: Sequence[tuple[Slot[Tensor], int]], start: int) -> Tensor:
        """A mixed step: tokens of other sequences, and the text's last one beside its prompt from `start` on."""
        slot, last = self._prefill([start]), len(self._ids) - 1
        rows = [self._row(*place) for place in (*others, (slot, last))]
        return self._step.run(rows, prompts=[sequence_chunk(slot, start, self._ids[start:last])])[0]

    def _row(self, slot: Slot[Tensor], at: int) -> StepRow:
        return StepRow(sequence_chunk(slot, at, self._ids[at : at + 1]), GREEDY, 0, 0)
