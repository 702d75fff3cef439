"""The passes of a decoder on CUDA, by Triton kernels: a step computes the next token of every row and samples it. A
mixed step also computes chunks of prompts, in the same pass over the weights.

A step is captured as a CUDA graph for each of a few numbers of rows. The graph reads which rows it has from device
tensors, so it serves any mix of sequences, wherever their slots are: joins and leaves are one small copy. A step leaves
the sampled tokens on the device, where the next one finds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.torch import (
    attention_kernels,
    device_filters,
    expert_kernels,
    kernel_functions,
    linear_kernels,
    sampling_kernels,
    step_kernels,
)
from palaver.engines.torch.batch import SequenceChunk
from palaver.engines.torch.cuda_graphs import Capture
from palaver.engines.torch.device_changes import UploadBuffer, to_device
from palaver.engines.torch.quantized_weights import PackedWeight
from palaver.engines.torch.step_weights import (
    NO_WINDOW,
    ExpertProjection,
    Experts,
    FeedForward,
    StepLayer,
    StepModel,
    TiledProjection,
)
from palaver.engines.torch.tile_shapes import ROWS, TileShape
from palaver.sampling import Sampling

MIXED_ROWS = (128, 256, 512, 1024)
"""Numbers of rows of mixed steps with a graph: first all rows of a step, used or not, then those of prompts."""
SHORT_CHUNK = 32
"""Tokens of prompts that a step computes as it does its own rows: the end of a prompt that a mixed step had no room for
would otherwise cost a pass of 128 rows."""
MIN_PROMPT_TOKENS = 64
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows with a graph; the rest of a graph's rows are padding."""
PROGRAMS = ((4, 32), (16, 16), (0, 8))
"""Up to how many rows so many programs share the attention of a row and a KV head."""
FIRST_CAPACITY = 16384
"""Tokens of the longest sequence that the buffers have room for at first."""
MEASURED_START = 4096
"""The position at which a prompt is timed to find out what attention costs."""
FIELDS = ("token", "position", "rotary", "base", "member", "head", "state", "start", "live", "block", "queries")
"""What a step reads of each row: its token, the token's position and rotary position; the address of its keys in layer
0 and the distances between layers and heads there; the state of its random numbers and where its reply starts; 1, or 0
for padding. The last two belong to no row: they list the blocks of prompts that attention is computed for, each with
its first row, counted from the first one of a prompt, and its number of rows."""


def slot_address(chunk: SequenceChunk) -> tuple[int, int, int]:
    """Where the keys of the slot's first layer are, and the elements between its layers and between its heads. All
    layers have the same heads."""
    ((heads, size), buffer), pool = next(iter(chunk.pool.buffers.items())), chunk.pool
    slot = heads * pool.capacity * size
    return (
        buffer.data_ptr() + chunk.index * slot * buffer.element_size(),
        pool.num_slots * slot,
        pool.capacity * size,
    )


def attention_programs(rows: int) -> int:
    """How many programs share the attention of a row and a KV head."""
    return next(programs for most, programs in PROGRAMS if rows <= most or not most)


@dataclass(frozen=True, slots=True)
class StepRow:
    """The next token of one sequence, and how the one after it is sampled."""

    chunk: SequenceChunk
    sampling: Sampling
    uniform_state: int
    """The state of the reply's random numbers."""
    reply_start: int
    """The position of the reply's first token."""

    @property
    def settings(self) -> tuple[float, ...]:
        """The sampler's settings; the random number is computed in the step."""
        return sampling_kernels.row_settings(self.sampling)[: sampling_kernels.BASIC_SETTINGS]


@dataclass(frozen=True, slots=True)
class MixedCosts:
    """How long steps take on this device, for a device whose clock can be read."""

    step: float
    """The seconds of a step with all rows, without prompts."""
    mixed: dict[int, float]
    """The seconds of mixed steps by their number of rows, all of them at the start of their texts."""
    pair: float
    """The seconds that each pair of a token of a prompt and a token before it takes more."""

    def prompt_tokens(self, load: PromptLoad, replies: int, seconds: float, max_rows: int) -> int:
        """How many tokens of prompts a step takes beside so many replies, if it may last so much longer: as many as
        let all of them wait least. For each token that is computed, a prompt waits for a share of the whole step, and a
        reply for a share of what the step lasts longer.

        At least MIN_PROMPT_TOKENS, so that prompts are computed at all."""
        least, found = math.inf, MIN_PROMPT_TOKENS
        for rows, mixed in self.mixed.items():
            extra, pairs = mixed - self.step, self.pair * load.start
            room = min(load.tokens, rows - max_rows)
            tokens = min(room, int(max(0.0, seconds - extra) / max(pairs, 1e-12)))
            if not tokens or tokens < min(room, MIN_PROMPT_TOKENS):
                continue
            extra += pairs * tokens
            waiting = (load.prompts * (self.step + extra) + replies * extra) / tokens
            if waiting < least:
                least, found = waiting, tokens
        return found


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """The prompts that are being computed: their number, the tokens that they lack, and how many the longest has."""

    prompts: int
    tokens: int
    start: int


class ExpertBuffers:
    """What the experts of a layer read and write in a pass over so many rows."""

    def __init__(self, experts: Experts, rows: int, like: Tensor) -> None:
        pairs, device = rows * experts.top_k, like.device
        self.capacity = rows
        """Pairs that an expert's list has room for."""
        self.logits = torch.zeros(rows, experts.router.outputs, device=device)
        self.chosen = torch.zeros(pairs, dtype=torch.int32, device=device)
        self.weights = torch.zeros(pairs, device=device)
        self.counts = torch.zeros(2 * kernel_functions.next_power(experts.count + 1), dtype=torch.int32, device=device)
        self.members = torch.zeros(experts.count * rows, dtype=torch.int32, device=device)
        self.gated = like.new_zeros(pairs, experts.gate_up.outputs)
        self.parts = torch.zeros(pairs, experts.down.outputs, device=device)


class StepBuffers:
    """What a pass over so many rows reads and writes besides the cache."""

    def __init__(
        self,
        model: StepModel,
        rows: int,
        tile_of: Callable[[TiledProjection], TileShape],
        shared: StepBuffers | None = None,
    ) -> None:
        """`shared`: of more rows, the first of which these are, too."""
        like, last = model.embedding, model.layers[-1]
        size = like.shape[1]
        normed = any(layer.output_gain is not None or layer.result_gain is not None for layer in model.layers)
        dense = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, FeedForward)]
        gated = dense[0].gate_up.outputs if dense else 0
        sizes = (size, size, last.qkv.outputs, last.output.inputs, gated, size if normed else 0)
        all_rows = [like.new_zeros(rows, size) for size in sizes] if shared is None else shared.tensors
        self.tensors: list[Tensor] = [tensor[:rows] for tensor in all_rows]
        self.hidden, self.scaled, self.qkv, self.attended, self.gated, self.result = self.tensors
        self.experts: ExpertBuffers | None = None
        if shared is not None:
            self.experts = shared.experts
        elif model.experts is not None:
            self.experts = ExpertBuffers(model.experts, rows, like)
        down = dense[0].down if dense else last.output
        parts = [projection.outputs // tile_of(projection).outputs for projection in (last.output, down)]
        squares = torch.zeros(rows * sum(parts), dtype=torch.float64, device=like.device)
        self.output_squares = squares[: rows * parts[0]].view(rows, parts[0])
        self.down_squares = squares[rows * parts[0] :].view(rows, parts[1])


class HostResults:
    """The sampler's results of a step, a row each (see `device_filters`), in memory of the host that the step writes
    to. The step after the next one overwrites them: read them before it starts."""

    def __init__(self, table: Tensor, done: torch.cuda.Event | None) -> None:
        """`done`: recorded behind the step; None where the step has ended."""
        self._table = table
        self._done = done
        self._read: NDArray[np.float64] | None = None

    def __call__(self) -> NDArray[np.float64]:
        """Waits for the step, and for nothing that starts later."""
        if self._read is None:
            if self._done is not None:
                self._done.synchronize()
            self._read = self._table.numpy().copy()
        return self._read


class DecoderStep:
    """The weights, buffers and graphs of one model. `exact`: single rows have the bits that they have in a batch.

    Logits and results have two places, which steps use in turn: what a step left is read while the next one runs."""

    def __init__(self, model: StepModel, exact: bool, capture: Capture | None, max_rows: int, pdl: bool) -> None:
        """`capture`: None where every kernel is launched by itself. `pdl`: programmatic dependent launch."""
        self.model = model
        self.device = model.embedding.device
        self.layers = model.layers
        self.exact = exact
        self._heads = model.heads
        fits = model.heads.prefill_bytes <= kernel_functions.shared_memory(self.device)
        self._prefill_stages = 2 if fits else 1
        self.capture = capture
        self._pdl = pdl
        self.max_rows = max_rows
        self._buckets = [rows for rows in BUCKETS if rows < max_rows] + [max_rows]
        self._short_rows = max_rows + SHORT_CHUNK
        larger = [rows for rows in MIXED_ROWS if rows >= 2 * max_rows and rows > self._short_rows] or [4 * max_rows]
        self.mixed_rows = [self._short_rows, *larger]
        most_rows = self.mixed_rows[-1]
        self._table = torch.zeros(len(FIELDS), most_rows, dtype=torch.int64, device=self.device)
        self._upload = UploadBuffer((len(FIELDS) + 1 + sampling_kernels.BASIC_SETTINGS) * most_rows, self.device)
        self._loads: dict[int, Callable[[], Tensor]] = {}
        """By the number of rows: graphs that write the tables, from the memory of uploads."""
        self.inputs = dict(zip(FIELDS, self._table, strict=True))
        self._prompt_inputs = dict(zip(FIELDS, self._table[:, max_rows:], strict=True))
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=self.device)
        """The tokens of the last step, one a row."""
        self._settings = torch.zeros(max_rows, sampling_kernels.BASIC_SETTINGS, dtype=torch.float64, device=self.device)
        self._unused = model.embedding.new_zeros(2 * len(self.layers) * self._heads.kv_heads * self._heads.size)
        """The cache of padding: one token."""
        shared = StepBuffers(model, most_rows, lambda projection: projection.tile)
        self._table[3:6] = torch.tensor(self._unused_address, device=self.device)[:, None]
        self._buffers = StepBuffers(model, max_rows, lambda projection: projection.tile, shared)
        self._mixed_buffers = {
            rows: StepBuffers(model, rows, methodcaller("prefill_tile", rows), shared) for rows in larger
        }
        short = StepBuffers(model, self._short_rows, lambda projection: projection.tile, shared)
        self._mixed_buffers[self._short_rows] = short
        self._logits = torch.full((2, max_rows, model.head.outputs), -torch.inf, device=self.device)
        on_cuda = self.device.type == "cuda"
        shape = (2, max_rows, device_filters.WIDTH)
        self._results = torch.zeros(shape, dtype=torch.float64, pin_memory=on_cuda)
        self._place = 0
        """Of the last step's logits and results."""
        self.lists = sampling_kernels.BlockLists(max_rows, model.head.outputs, self.device)
        """Of the last step's logits."""
        row_tiles = -(-self._short_rows // ROWS)
        self._partials = torch.zeros(model.partial_sums * row_tiles * ROWS, device=self.device)
        self._counters = torch.zeros(model.partial_sums // 64 * row_tiles, dtype=torch.int32, device=self.device)
        packed = [one.packed for layer in self.layers for one in layer.linears if one.packed is not None]
        self._unpacked = model.embedding.new_zeros(max((one.outputs * one.inputs for one in packed), default=0))
        """The numbers of one layer's packed weights as floats, for products with many rows."""
        self._capacity = 0
        self._graphs: dict[tuple[int, int, bool, bool, int], Callable[[], Tensor]] = {}
        """By the numbers of rows of a step, and of all rows, whether they may be tokens of one sequence, whether their
        logits are known, and the place of the logits and results."""
        self._count = self._longest = 0
        """The rows of the last step, and the last position of the longest of them."""
        self.costs: MixedCosts | None = None
        """None where nothing was measured."""
        self._reserve(min(FIRST_CAPACITY, len(model.rotary[0][0]) - 1))
        self._load_rows([])

    @property
    def max_prompt_tokens(self) -> int:
        """How many tokens of prompts a mixed step may compute."""
        return self.mixed_rows[-1] - self.max_rows

    def set_tokens(self, tokens: Tensor) -> None:
        """Replaces the tokens that the last step sampled, one a row."""
        self._sampled[: len(tokens)].copy_(tokens)

    def last_logits(self, rows: int) -> Tensor:
        """Those of the last step, as long as no other runs: of so many rows and padding."""
        return self._logits[self._place, : self._bucket(rows)]

    def replace_tokens(self, results: Tensor) -> None:
        """The next step of the same rows goes on with these tokens instead of those that the last one sampled."""
        step_kernels.replace_tokens(results, self._sampled, self.inputs)

    def run(
        self,
        rows: Sequence[StepRow],
        sources: Sequence[int] | None = None,
        prompts: Sequence[SequenceChunk] = (),
    ) -> tuple[Tensor, HostResults]:
        """Computes one token of each row, which is written to its slot; samples the next one by the settings of its
        reply. Returns the logits and the sampler's results; both are overwritten by the step after the next one.

        `sources`: of each row, the row of the last step whose token it has; -1 where its chunk has the token, None
        where all have. `prompts` are computed in the same pass, at most `max_prompt_tokens`; the last token of a
        prompt may be a row.
        """
        count = len(rows)
        total = self._mixed_size(self.max_rows + sum(len(chunk.ids) for chunk in prompts)) if prompts else 0
        self._prepare(rows, prompts if total == self._short_rows else ())
        self._load_rows(rows, sources, prompts)
        if prompts:
            self._replay(self.max_rows, total)
        else:
            self._replay(self._bucket(count))
        self._count = count
        return self._take_results(count)

    def verify(self, rows: Sequence[StepRow]) -> tuple[Tensor, HostResults]:
        """As `run`, where rows may be tokens of one sequence that follow each other: each sees those before it."""
        self._prepare(rows)
        self._load_rows(rows)
        self._replay(self._bucket(len(rows)), drafts=True)
        return self._take_results(len(rows))

    def resume(self, rows: Sequence[StepRow], logits: Sequence[Tensor]) -> tuple[Tensor, HostResults]:
        """As `run`, where the logits after each row are known, [1, vocabulary] each: they are sampled, and no layer is
        computed."""
        self._prepare(rows)
        self._load_rows(rows)
        place = self._logits[1 - self._place, :, : self.model.vocabulary_size]
        for row, known in enumerate(logits):
            place[row].copy_(known[0])
        self._replay(self._bucket(len(rows)), known=True)
        self._count = len(rows)
        return self._take_results(len(rows))

    def repeat(self) -> tuple[Tensor, HostResults]:
        """The next step of the same rows, with the tokens that the last one sampled. The slots have room for them."""
        self._longest += 1
        if self._longest >= self._capacity:
            self._reserve(2 * self._longest)
        self._replay(self._bucket(self._count))
        return self._take_results(self._count)

    def _take_results(self, rows: int) -> tuple[Tensor, HostResults]:
        """The logits and the results of the last step, without padding."""
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        logits = self._logits[self._place, :rows, : self.model.vocabulary_size]
        return logits, HostResults(self._results[self._place, :rows], done)

    def _prepare(self, rows: Sequence[StepRow], prompts: Sequence[SequenceChunk] = ()) -> None:
        """Makes room for the attention of these rows, and of prompts that are computed as rows are."""
        ends = (chunk.start + len(chunk.ids) - 1 for chunk in prompts)
        self._longest = max((*(row.chunk.start for row in rows), *ends), default=0)
        if self._longest >= self._capacity:
            self._reserve(2 * self._longest)

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def prefill(self, chunks: Sequence[SequenceChunk]) -> None:
        """Computes the keys and values of these tokens, with the bits that they have if computed one by one."""
        columns = np.zeros((len(FIELDS), sum(len(chunk.ids) for chunk in chunks)), dtype=np.int64)
        blocks = self._fill_prompts(columns, chunks)
        inputs = dict(zip(FIELDS, to_device(columns, self.device), strict=True))
        buffers = StepBuffers(self.model, columns.shape[1], methodcaller("prefill_tile", columns.shape[1]))
        self._embed(inputs, buffers, None)
        for index, layer in enumerate(self.layers):
            self._linear(layer.qkv, buffers.scaled, buffers.qkv, squares=buffers.down_squares, prefill=True)
            self._rotate_and_write(layer, index, inputs, buffers.qkv)
            if index == len(self.layers) - 1:
                return
            self._attend_prefill(layer, index, inputs, buffers.qkv, buffers.attended, blocks)
            self._finish_layer(index, buffers, inputs, prefill=True)

    def _mixed_size(self, rows: int) -> int:
        """Of all rows of a mixed step."""
        if self.capture is None:
            return max(rows, self._short_rows)
        return next(size for size in self.mixed_rows if size >= rows)

    def _reserve(self, tokens: int) -> None:
        """Makes room for the attention over so many tokens. Graphs are captured again."""
        self._capacity = tokens
        self._entries = -(-tokens // attention_kernels.TILE)
        heads = self._heads
        entries = self._short_rows * heads.kv_heads * self._entries * heads.padded_group
        self._graphs.clear()
        self._tiles = torch.empty(entries * heads.size, device=self.device)
        self._tile_sums = torch.empty(entries * 2, device=self.device)

    def _load_rows(
        self, rows: Sequence[StepRow], sources: Sequence[int] | None = None, prompts: Sequence[SequenceChunk] = ()
    ) -> None:
        """Writes the device's tables."""
        count, prompt_tokens = len(rows), sum(len(chunk.ids) for chunk in prompts)
        size = self._mixed_size(self.max_rows + prompt_tokens) if prompts else self.max_rows
        new = self._empty_rows(size)
        settings = new[len(FIELDS) + 1 :].view(np.float64)
        for i, row in enumerate(rows):
            chunk = row.chunk
            position = chunk.start
            new[:3, i] = chunk.ids[0], position, position + chunk.rotary_shift
            new[3:6, i] = slot_address(chunk)
            new[6, i] = np.uint64(row.uniform_state).view(np.int64)
            new[7:9, i] = row.reply_start, 1
            settings[:, i] = row.settings
        self._fill_prompts(new[: len(FIELDS), self.max_rows :], prompts)
        if sources is not None:
            new[len(FIELDS), :count] = sources
        self._write_tables(new)

    def _empty_rows(self, size: int) -> NDArray[np.int64]:
        """What `step_kernels.load_rows` reads, for so many rows of padding."""
        new = np.zeros((len(FIELDS) + 1 + sampling_kernels.BASIC_SETTINGS, size), dtype=np.int64)
        new[3:6] = np.array(self._unused_address)[:, None]
        new[len(FIELDS)] = -1
        return new

    def _write_tables(self, new: NDArray[np.int64]) -> None:
        sent, size = self._upload.send(new), new.shape[1]

        def write() -> Tensor:
            step_kernels.load_rows(sent, self._sampled, self._table, self._settings)
            return self._table

        if size in self._loads:
            self._loads[size]()
            return
        write()
        if self.capture is not None:
            self._loads[size] = self.capture(write)

    def _fill_prompts(self, columns: NDArray[np.int64], chunks: Sequence[SequenceChunk]) -> int:
        """Writes a column for each token, one chunk after the other, and the list of blocks. Returns their number."""
        queries = self._heads.prefill_queries
        at, blocks = 0, []
        for chunk in chunks:
            stop = at + len(chunk.ids)
            columns[0, at:stop] = chunk.ids
            columns[1, at:stop] = np.arange(chunk.start, chunk.start + stop - at)
            columns[2, at:stop] = columns[1, at:stop] + chunk.rotary_shift
            columns[3:6, at:stop] = np.array(slot_address(chunk))[:, None]
            columns[8, at:stop] = 1
            blocks += [
                (chunk.start + first - at, first, min(queries, stop - first)) for first in range(at, stop, queries)
            ]
            at = stop
        if blocks:
            blocks.sort(reverse=True)  # those that attend longest first
            columns[9:11, : len(blocks)] = np.array(blocks).T[1:]
        return len(blocks)

    @property
    def _unused_address(self) -> tuple[int, int, int]:
        """As in `slot_address`, for padding."""
        return self._unused.data_ptr(), self._heads.kv_heads * self._heads.size, self._heads.size

    def capture_all(self, drafted_rows: int = 0) -> None:
        """Captures the graphs of all numbers of rows, so that no request waits for one; those that verify drafts up to
        so many rows."""
        if self.capture is not None:
            steps = [(bucket, 0, False, False) for bucket in self._buckets]
            steps += [(bucket, 0, True, False) for bucket in self._buckets if 1 < bucket <= drafted_rows]
            steps += [(bucket, 0, False, True) for bucket in self._buckets]
            steps += [(self.max_rows, rows, False, False) for rows in self.mixed_rows]
            for step in steps:
                for _ in range(2):  # one for each place of the results
                    self._replay(*step)
            for rows in self.mixed_rows:
                self._write_tables(self._empty_rows(rows))
            self.costs = self._measure()

    def _measure(self) -> MixedCosts:
        """Times steps, with prompts in memory of their own."""
        rows, start = self.mixed_rows[-1], MEASURED_START
        tokens = rows - self.max_rows
        memory = self.model.embedding.new_zeros((start + tokens) * self._heads.size)
        held = self._table.clone()
        columns = np.zeros((len(FIELDS), tokens), dtype=np.int64)
        columns[0] = np.arange(tokens) * 7919 % len(self.model.embedding)  # which take different experts
        columns[3:6] = np.array(self._unused_address)[:, None]
        columns[8] = 1
        self._table[:, self.max_rows :].copy_(to_device(columns, self.device))
        step = self._time(self.max_rows)
        mixed = {size: self._time(self.max_rows, size) for size in self.mixed_rows}
        queries = self._heads.prefill_queries
        firsts = np.arange(0, tokens, queries)
        columns[1] = np.arange(start, start + tokens)
        columns[3] = memory.data_ptr()
        columns[4:6] = 0
        columns[9, : len(firsts)] = firsts
        columns[10, : len(firsts)] = np.minimum(queries, tokens - firsts)
        self._table[:, self.max_rows :].copy_(to_device(columns, self.device))
        longer = self._time(self.max_rows, rows) - mixed[rows]
        self._table.copy_(held)
        return MixedCosts(step, mixed, max(0.0, longer) / (tokens * start))

    def _time(self, bucket: int, total: int = 0) -> float:
        """The seconds of a step: the shortest of a few."""
        seconds = []
        for _ in range(4):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            self._replay(bucket, total)
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1e3)
        return min(seconds)

    def _replay(self, bucket: int, total: int = 0, drafts: bool = False, known: bool = False) -> None:
        """`total`: all rows of a mixed step, else 0. `drafts`: as in `verify`. `known`: as in `resume`."""
        self._place = 1 - self._place
        compute = partial(self._compute, bucket, total, drafts, known)
        if self.capture is None:
            compute()
            return
        key = bucket, total, drafts, known, self._place
        if key not in self._graphs:
            self._compute_for_compilation(compute)
            self._graphs[key] = self.capture(compute)
        self._graphs[key]()

    def _compute_for_compilation(self, compute: Callable[[], Tensor]) -> None:
        """Kernels can't be compiled while a graph is captured. Leaves the tables and the cache as they are."""
        held = [tensor.clone() for tensor in (self._table, self._settings, self._sampled)]
        self._table.zero_()
        self._table[3:6] = torch.tensor(self._unused_address, device=self.device)[:, None]
        compute()
        for tensor, before in zip((self._table, self._settings, self._sampled), held, strict=True):
            tensor.copy_(before)

    def _compute(self, rows: int, total: int, drafts: bool, known: bool) -> Tensor:
        """As in `_replay`."""
        buffers, logits = self._buffers, self._logits[self._place, :rows]
        if known:
            self._embed(self.inputs, buffers, self._settings, rows)  # which draws the random numbers, too
            return self._sample(logits)
        vector = rows == 1 and not total and not drafts and not self.exact and not self.model.quantized
        self._embed(self.inputs, buffers if not total else self._buffers_of(total), self._settings, rows)
        if total:
            self._compute_mixed_layers(total)
        elif vector:
            self._compute_vector_layers()
        else:
            for index, layer in enumerate(self.layers):
                self._linear(layer.qkv, buffers.scaled, buffers.qkv, squares=buffers.down_squares, rows=rows)
                if drafts:
                    self._rotate_and_write(layer, index, self.inputs, buffers.qkv[:rows])
                self._attend(layer, index, buffers, rows, rotated=drafts)
                self._finish_layer(index, buffers, self.inputs, rows=rows)
        head, softcap = self.model.head, self.model.logit_softcap
        if vector:
            self._matvec(head, buffers.hidden, logits, gain=self.model.final_gain, softcap=softcap)
        else:
            self._linear(head, buffers.scaled, logits, squares=buffers.down_squares, softcap=softcap, rows=rows)
        return self._sample(logits)

    def _sample(self, logits: Tensor) -> Tensor:
        """Samples the first rows; the next step goes on with their tokens."""
        rows = len(logits)
        settings, lists = self._settings[:rows], self.lists
        lists.compute(logits, settings)
        results = sampling_kernels.sample_rows(logits, logits, settings, lists, lists)
        step_kernels.advance(results, self._results[self._place], self._sampled, self.inputs, rows)
        return results

    def _compute_vector_layers(self) -> None:
        """The layers of a single row, by kernels that sum in an order of their own."""
        buffers = self._buffers
        for index, layer in enumerate(self.layers):
            self._matvec(layer.qkv, buffers.hidden, buffers.qkv, gain=layer.input_gain)
            self._attend(layer, index, buffers, 1)
            self._finish_vector_layer(index, buffers)

    def _compute_mixed_layers(self, total: int) -> None:
        """The layers of all rows of a step and of prompts behind them; the last one of the step's rows alone, besides
        the keys and values of prompts."""
        rows, buffers, inputs = self.max_rows, self._buffers_of(total), self._prompt_inputs
        prompts = total - rows
        queries = self._heads.prefill_queries
        blocks = min(prompts, -(-prompts // queries) + rows)
        model, gain = self.model, self.layers[0].input_gain
        outputs = (buffers.hidden[rows:], buffers.scaled[rows:], buffers.down_squares[rows:])
        step_kernels.embed(inputs, None, model.embedding, gain, *outputs, model.embedding_scale)
        if total == self._short_rows:
            self._compute_short_layers(buffers)
            return
        for index, layer in enumerate(self.layers):
            self._linear(layer.qkv, buffers.scaled, buffers.qkv, squares=buffers.down_squares, prefill=True)
            self._rotate_and_write(layer, index, inputs, buffers.qkv[rows:])
            self._attend(layer, index, buffers, rows)
            if index == len(self.layers) - 1:
                self._finish_layer(index, self._buffers, self.inputs, rows=rows)
            else:
                self._attend_prefill(layer, index, inputs, buffers.qkv[rows:], buffers.attended[rows:], blocks)
                self._finish_layer(index, buffers, self.inputs, prefill=True)

    def _compute_short_layers(self, buffers: StepBuffers) -> None:
        """The same for a few tokens of prompts, which are computed as the rows are."""
        total, last = self._short_rows, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            self._linear(layer.qkv, buffers.scaled, buffers.qkv, squares=buffers.down_squares, rows=total)
            self._rotate_and_write(layer, index, self.inputs, buffers.qkv)
            if index == last:
                self._attend(layer, index, self._buffers, self.max_rows, rotated=True)
                self._finish_layer(index, self._buffers, self.inputs, rows=self.max_rows)
            else:
                self._attend(layer, index, buffers, total, rotated=True)
                self._finish_layer(index, buffers, self.inputs, rows=total)

    def _buffers_of(self, total: int) -> StepBuffers:
        """Of a mixed step. Without graphs it has any number of rows."""
        if total not in self._mixed_buffers:
            largest = self._mixed_buffers[self.mixed_rows[-1]]
            self._mixed_buffers[total] = StepBuffers(self.model, total, methodcaller("prefill_tile", total), largest)
        return self._mixed_buffers[total]

    def _next_gain(self, index: int) -> Tensor:
        """The gain of the norm after a layer."""
        last = index == len(self.layers) - 1
        return self.model.final_gain if last else self.layers[index + 1].input_gain

    def _finish_layer(
        self,
        index: int,
        buffers: StepBuffers,
        inputs: Mapping[str, Tensor],
        rows: int | None = None,
        prefill: bool = False,
    ) -> None:
        """From the attention's result to the next layer's input."""
        layer = self.layers[index]
        same: dict[str, Any] = {"rows": rows, "prefill": prefill}
        after_attention = (layer.feed_forward_gain, buffers.scaled, buffers.output_squares)
        if layer.output_gain is None:
            self._linear(layer.output, buffers.attended, buffers.hidden, residual=after_attention, **same)
        else:
            self._linear(layer.output, buffers.attended, buffers.result, **same)
            self._add(buffers.result, buffers, after_attention, layer.output_gain, rows)
        after_layer = (self._next_gain(index), buffers.scaled, buffers.down_squares)
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, Experts):
            self._run_experts(feed_forward, buffers, inputs["live"], **same)
            self._add(None, buffers, after_layer, layer.result_gain, rows, feed_forward)
            return
        squares = buffers.output_squares
        self._linear(feed_forward.gate_up, buffers.scaled, buffers.gated, squares=squares, gated=True, **same)
        if layer.result_gain is None:
            self._linear(feed_forward.down, buffers.gated, buffers.hidden, residual=after_layer, **same)
        else:
            self._linear(feed_forward.down, buffers.gated, buffers.result, **same)
            self._add(buffers.result, buffers, after_layer, layer.result_gain, rows)

    def _finish_vector_layer(self, index: int, buffers: StepBuffers) -> None:
        """The same for a single row, in the order of sums of `_matvec`."""
        layer = self.layers[index]
        after_attention = (layer.feed_forward_gain, buffers.scaled, buffers.output_squares)
        after_layer = (self._next_gain(index), buffers.scaled, buffers.down_squares)
        normed = layer.output_gain is not None
        feed_forward, gain = layer.feed_forward, layer.feed_forward_gain
        narrow = isinstance(feed_forward, Experts) and feed_forward.narrow
        if narrow and not normed:  # tiles read what only tiles write
            self._linear(layer.output, buffers.attended, buffers.hidden, residual=after_attention, rows=1)
        else:
            out = buffers.result if normed else buffers.hidden
            self._matvec(layer.output, buffers.attended, out, residual=not normed)
        if normed:
            self._add(buffers.result, buffers, after_attention, layer.output_gain, 1)
        if narrow:
            assert isinstance(feed_forward, Experts)
            self._run_experts(feed_forward, buffers, self.inputs["live"], 1, False)
            self._add(None, buffers, after_layer, layer.result_gain, 1, feed_forward)
            return
        normed = layer.result_gain is not None
        out = buffers.result if normed else buffers.hidden
        if isinstance(feed_forward, Experts):
            self._run_vector_experts(feed_forward, buffers, gain, out, residual=not normed)
        else:
            self._matvec(feed_forward.gate_up, buffers.hidden, buffers.gated, gain=gain, gated=True)
            self._matvec(feed_forward.down, buffers.gated, out, residual=not normed)
        if normed:
            self._add(buffers.result, buffers, after_layer, layer.result_gain, 1)

    def _run_experts(
        self, experts: Experts, buffers: StepBuffers, live: Tensor, rows: int | None, prefill: bool
    ) -> None:
        """Leaves a result for each pair of a row and an expert."""
        mine, count = buffers.experts, len(buffers.scaled) if rows is None else rows
        assert mine is not None
        squares = buffers.output_squares
        self._linear(experts.router, buffers.scaled, mine.logits, squares=squares, rows=rows, prefill=prefill)
        self._route(experts, mine, live, count, lists=True)
        same = (experts, mine, count, prefill)
        self._expert_linear(experts.gate_up, buffers.scaled, mine.gated, *same, squares=squares)
        self._expert_linear(experts.down, mine.gated, mine.parts, *same)

    def _run_vector_experts(
        self, experts: Experts, buffers: StepBuffers, gain: Tensor, out: Tensor, residual: bool
    ) -> None:
        mine = buffers.experts
        assert mine is not None
        self._matvec(experts.router, buffers.hidden, mine.logits, gain=gain)
        self._route(experts, mine, self.inputs["live"], 1, lists=False)
        up, down, options = experts.gate_up, experts.down, {"PDL": self._pdl} | self._launch
        expert_kernels._expert_gate_up[(experts.top_k * up.outputs // up.vector.outputs,)](
            buffers.hidden,
            up.weight,
            buffers.hidden if up.bias is None else up.bias,
            gain,
            mine.chosen,
            mine.gated,
            self.model.epsilon,
            N=up.outputs,
            K=up.inputs,
            BN=up.vector.outputs,
            BK=up.vector.depth,
            BIAS=up.bias is not None,
            INTERLEAVED=up.interleaved,
            ACTIVATION=self.model.activation,
            num_warps=up.vector.warps,
            **options,
        )
        expert_kernels._expert_down[(down.outputs // down.vector.outputs,)](
            mine.gated,
            down.weight,
            buffers.hidden if down.bias is None else down.bias,
            mine.chosen,
            mine.weights,
            out,
            N=down.outputs,
            K=down.inputs,
            TOP=experts.top_k,
            BN=down.vector.outputs,
            BK=down.vector.depth,
            BIAS=down.bias is not None,
            RESIDUAL=residual,
            num_warps=down.vector.warps,
            **options,
        )

    def _route(self, experts: Experts, buffers: ExpertBuffers, live: Tensor, rows: int, lists: bool) -> None:
        """`lists`: enters each row into the lists of its experts."""
        expert_kernels._route[(rows,)](
            buffers.logits,
            live,
            buffers.chosen,
            buffers.weights,
            buffers.counts,
            buffers.members,
            buffers.capacity,
            E=experts.count,
            EP=kernel_functions.next_power(experts.count),
            STRIDE=experts.router.outputs,
            TOP=experts.top_k,
            TOPP=kernel_functions.next_power(experts.top_k),
            NORMALISED=experts.normalised,
            LISTS=lists,
            **kernel_functions.launch_options(self._pdl, num_warps=1),
        )

    def _expert_linear(
        self,
        projection: ExpertProjection,
        x: Tensor,
        out: Tensor,
        experts: Experts,
        buffers: ExpertBuffers,
        rows: int,
        prefill: bool,
        squares: Tensor | None = None,
    ) -> None:
        """`squares`: of x, which then has a row for each token and lacks a norm; it is the input of gate and up."""
        tile = projection.prefill_tile if prefill else projection.tile
        gated = squares is not None
        parts = 0 if squares is None else squares.shape[1]
        programs = min(experts.count, rows * experts.top_k) * (projection.outputs // tile.outputs)
        expert_kernels._expert_linear[(programs,)](
            x,
            projection.weight,
            x if projection.exponents is None else projection.exponents,
            x if projection.bias is None else projection.bias,
            x if squares is None else squares,
            buffers.counts,
            buffers.members,
            out,
            buffers.capacity,
            self.model.epsilon,
            E=experts.count,
            N=projection.outputs,
            K=projection.inputs,
            TOP=experts.top_k,
            BM=tile.rows,
            BN=tile.outputs,
            BK=tile.depth,
            STAGES=tile.stages,
            NT=parts,
            NTP=kernel_functions.next_power(max(1, parts)),
            BIAS=projection.bias is not None,
            GLU=gated,
            INTERLEAVED=projection.interleaved,
            NARROW=projection.exponents is not None,
            ACTIVATION=self.model.activation,
            BY_ROW=gated,
            **kernel_functions.launch_options(self._pdl and not prefill, num_warps=tile.warps),
        )

    def _add(
        self,
        result: Tensor | None,
        buffers: StepBuffers,
        residual: tuple[Tensor, Tensor, Tensor],
        own_gain: Tensor | None,
        rows: int | None,
        experts: Experts | None = None,
    ) -> None:
        """Adds a result to the residual: that of the experts where it is None. `residual`: as in `_linear`. `own_gain`:
        of the result's own norm."""
        gain, scaled, squares = residual
        mine, size, parts = buffers.experts, buffers.hidden.shape[1], squares.shape[1]
        if result is None:
            assert mine is not None
            result = mine.parts
        step_kernels._add[(len(buffers.hidden) if rows is None else rows,)](
            result,
            result if mine is None else mine.weights,
            result if mine is None else mine.counts,
            gain if own_gain is None else own_gain,
            gain,
            buffers.hidden,
            scaled,
            squares,
            self.model.epsilon,
            K=size,
            BK=kernel_functions.next_power(size),
            TOP=1 if experts is None else experts.top_k,
            EXPERTS=experts is not None,
            COUNTS=1 if experts is None else kernel_functions.next_power(experts.count + 1),
            NORM=own_gain is not None,
            NT=parts,
            NTP=kernel_functions.next_power(parts),
            **kernel_functions.launch_options(self._pdl, num_warps=8),
        )

    @property
    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._pdl else {}

    def _embed(
        self, inputs: dict[str, Tensor], buffers: StepBuffers, settings: Tensor | None, rows: int | None = None
    ) -> None:
        model, hidden = self.model, buffers.hidden[:rows]
        gain, outputs = self.layers[0].input_gain, (hidden, buffers.scaled, buffers.down_squares)
        step_kernels.embed(inputs, settings, model.embedding, gain, *outputs, model.embedding_scale)

    def _linear(
        self,
        projection: TiledProjection,
        x: Tensor,
        out: Tensor,
        squares: Tensor | None = None,
        residual: tuple[Tensor, Tensor, Tensor] | None = None,
        gated: bool = False,
        softcap: float = 0.0,
        rows: int | None = None,
        prefill: bool = False,
        compile_only: bool = False,
    ) -> None:
        """`squares`: of x, which lacks a norm. `residual`: the gain of the norm after it, and where its input and the
        partial sums of squares go. `compile_only`: computes nothing."""
        rows = len(x) if rows is None else rows
        tile = projection.prefill_tile(rows) if prefill else projection.decode_tile(rows)
        assert tile.suits(gated), "a tile for products of the other kind"
        assert projection.outputs % tile.outputs == 0, "a tile that does not divide the product"
        parts = 0 if squares is None else squares.shape[1]
        gain, scaled, out_squares = (x, out, x) if residual is None else residual
        split = 1 if prefill else projection.split
        grid = (-(-rows // tile.rows) * (projection.outputs // tile.outputs) * split,)
        packed = projection.packed
        zeros = None if packed is None else packed.zeros
        unpacks = prefill and projection.unpacks(rows)
        if packed is not None and unpacks and not compile_only:
            self._unpack(packed)
        bias, sums = x if projection.bias is None else projection.bias, x if squares is None else squares
        sizes: dict[str, Any] = {
            "N": projection.outputs,
            "K": projection.inputs,
            "BM": tile.rows,
            "BK": tile.depth,
            "STAGES": tile.stages,
            "NT": parts,
            "NTP": kernel_functions.next_power(max(1, parts)),
            "BIAS": projection.bias is not None,
            "GLU": gated,
            "ACTIVATION": self.model.activation,
            "RESIDUAL": residual is not None,
        }
        if tile.has_blocks:
            blocks = linear_kernels._linear_blocks
            launch = partial(blocks.warmup, grid=grid) if compile_only else blocks[grid]
            outputs = (gain, out, scaled, out_squares, rows, self.model.epsilon)
            options = {"num_warps": tile.warps, "enable_fp_fusion": False}
            launch(x, projection.weight, bias, sums, *outputs, **sizes, **options)
            return
        kernel = linear_kernels._linear
        launch = partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]
        launch(
            x,
            self._unpacked if unpacks else projection.weight,
            x if packed is None else packed.scales,
            x if zeros is None else zeros,
            bias,
            sums,
            gain,
            out,
            scaled,
            out_squares,
            self._partials,
            self._counters,
            rows,
            self.model.epsilon,
            BN=tile.outputs,
            SPLIT=projection.split,
            PARALLEL=split > 1,
            KIND="" if packed is None else "unpacked" if unpacks else packed.kind.value,
            GROUP=0 if packed is None or packed.group == packed.inputs else packed.group,
            ZEROS=zeros is not None and not unpacks,
            PERIOD=packed.period if packed is not None and unpacks else 0,
            SOFTCAP=softcap,
            DISTANCE=tile.distance,
            EARLY=tile.early,
            **sizes,
            **kernel_functions.launch_options(self._pdl and not prefill, num_warps=tile.warps),
        )

    def _unpack(self, packed: PackedWeight) -> None:
        """The next product reads what this writes; the one after it may overwrite it."""
        zeros = packed.zeros
        linear_kernels._unpack[(packed.words.shape[0] * packed.words.shape[1],)](
            packed.words,
            packed.scales if zeros is None else zeros,
            self._unpacked,
            OUT=packed.outputs,
            K=packed.inputs,
            BK=packed.width,
            KIND=packed.kind.value,
            GROUP=0 if packed.group == packed.inputs else packed.group,
            ZEROS=zeros is not None,
            num_warps=4,
        )

    def _matvec(
        self,
        projection: TiledProjection,
        x: Tensor,
        out: Tensor,
        gain: Tensor | None = None,
        gated: bool = False,
        residual: bool = False,
        softcap: float = 0.0,
    ) -> None:
        shape = projection.vector
        linear_kernels._matvec[(projection.outputs // shape.outputs,)](
            x,
            projection.weight,
            x if projection.bias is None else projection.bias,
            x if gain is None else gain,
            out,
            self.model.epsilon,
            N=projection.outputs,
            K=projection.inputs,
            BN=shape.outputs,
            BK=shape.depth,
            NORM=gain is not None,
            BIAS=projection.bias is not None,
            GLU=gated,
            ACTIVATION=self.model.activation,
            SOFTCAP=softcap,
            RESIDUAL=residual,
            AHEAD=shape.ahead,
            PDL=self._pdl,
            num_warps=shape.warps,
            **self._launch,
        )

    def _attend(self, layer: StepLayer, index: int, buffers: StepBuffers, rows: int, rotated: bool = False) -> None:
        """`rotated`: queries and keys are, and keys and values are written."""
        heads, inputs, attention = self._heads, self.inputs, layer.attention
        cos, sin = self.model.rotary[attention.rotary]
        programs = attention_programs(rows)
        attention_kernels._attend[(rows * heads.kv_heads, programs)](
            buffers.qkv,
            inputs["base"],
            inputs["member"],
            inputs["head"],
            inputs["position"],
            inputs["rotary"],
            cos,
            sin,
            layer.query_gain,
            layer.key_gain,
            self._tiles,
            self._tile_sums,
            index,
            self._entries,
            attention.scale,
            self.model.qk_epsilon,
            attention.window,
            attention.softcap or 1.0,
            PROGRAMS=programs,
            NORM=heads.norm,
            ROTATED=rotated,
            WINDOW=attention.window < NO_WINDOW,
            SOFTCAP=attention.softcap is not None,
            STAGES=2,
            **heads.sizes,
            **kernel_functions.launch_options(self._pdl, num_warps=4),
        )
        attention_kernels.join_tiles(
            self._tiles,
            self._tile_sums,
            inputs["position"],
            attention.sinks,
            buffers.attended,
            rows,
            self._entries,
            attention.window if attention.window < NO_WINDOW else None,
            heads.sizes,
            self._pdl,
        )

    def _rotate_and_write(self, layer: StepLayer, index: int, inputs: dict[str, Tensor], qkv: Tensor) -> None:
        heads, (cos, sin) = self._heads, self.model.rotary[layer.attention.rotary]
        attention_kernels.rotate_and_write(
            qkv,
            [inputs[name] for name in ("base", "member", "head")],
            inputs["position"],
            (inputs["rotary"], cos, sin),
            (layer.query_gain, layer.key_gain),
            index,
            self.model.qk_epsilon,
            heads.sizes,
            heads.norm,
        )

    def _attend_prefill(
        self, layer: StepLayer, index: int, inputs: dict[str, Tensor], qkv: Tensor, out: Tensor, blocks: int
    ) -> None:
        heads, attention = self._heads, layer.attention
        attention_kernels._attend_prefill[(blocks, heads.kv_heads)](
            qkv,
            out if attention.sinks is None else attention.sinks,
            out,
            inputs["base"],
            inputs["member"],
            inputs["head"],
            inputs["position"],
            inputs["block"],
            inputs["queries"],
            index,
            attention.scale,
            attention.window,
            attention.softcap or 1.0,
            WINDOW=attention.window < NO_WINDOW,
            SOFTCAP=attention.softcap is not None,
            SINKS=attention.sinks is not None,
            QUERIES=heads.prefill_queries,
            STAGES=self._prefill_stages,
            **heads.sizes,
            num_warps=8 if heads.size == 256 else 4,
            enable_fp_fusion=False,
        )
