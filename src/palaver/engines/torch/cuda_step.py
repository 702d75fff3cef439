"""The passes of a plain decoder on CUDA, by the kernels of `step_kernels.py`: a step computes the next token of every
row and samples it.

A step is captured as a CUDA graph for each of a few numbers of rows. The graph reads which rows it has from device
tensors, so it serves any mix of sequences, wherever their slots are: joins and leaves are one small copy. A step leaves
the sampled tokens on the device, where the next one finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaver.engines.torch import sampling_kernels, step_kernels
from palaver.engines.torch.batch import SequenceChunk
from palaver.engines.torch.cuda_graphs import Capture
from palaver.engines.torch.device_changes import to_device
from palaver.engines.torch.plain_decoder import PlainDecoder
from palaver.engines.torch.step_weights import (
    ROWS,
    HeadShape,
    StepLayer,
    TiledProjection,
    TileShape,
    check_norms,
    rotary_tables,
)
from palaver.sampling import Sampling

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rows with a graph; the rest of a graph's rows are padding."""
PREFILL_ROWS = 64
"""Queries of all heads that one program of a prefill attends for."""
PROGRAMS = ((4, 32), (16, 16), (0, 8))
"""Up to how many rows so many programs share the attention of a row and a KV head."""
FIRST_CAPACITY = 4096
"""Tokens of the longest sequence that the buffers have room for at first."""
FIELDS = ("token", "position", "rotary", "base", "member", "head", "state", "start", "live")
"""What a step reads of each row: its token, the token's position and rotary position; the address of its keys in layer
0 and the distances between layers and heads there; the state of its random numbers and where its reply starts; 1, or 0
for padding."""


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
        sampling = self.sampling
        if sampling.temperature == 0:
            return (0, 0, 1, 0, 0, -1)
        top_k = min(sampling.top_k, sampling_kernels.MAX_TOP_K)
        return (1 / sampling.temperature, top_k, sampling.top_p, sampling.min_p, 0, -1)


class StepBuffers:
    """What a pass over so many rows reads and writes besides the cache."""

    def __init__(self, step: DecoderStep, rows: int, tile_of: Callable[[TiledProjection], TileShape]) -> None:
        like, last = step.embedding, step.layers[-1]
        size = like.shape[1]
        self.hidden, self.scaled = like.new_empty(rows, size), like.new_empty(rows, size)
        self.qkv = like.new_empty(rows, last.qkv.outputs)
        self.attended = like.new_empty(rows, last.output.inputs)
        self.gated = like.new_empty(rows, last.gate_up.outputs)
        parts = [projection.outputs // tile_of(projection).outputs for projection in (last.output, last.down)]
        squares = torch.zeros(rows * sum(parts), dtype=torch.float64, device=like.device)
        self.output_squares = squares[: rows * parts[0]].view(rows, parts[0])
        self.down_squares = squares[rows * parts[0] :].view(rows, parts[1])


class DecoderStep:
    """The weights, buffers and graphs of one model. `exact`: single rows have the bits that they have in a batch."""

    def __init__(self, parts: PlainDecoder, exact: bool, capture: Capture | None, max_rows: int, pdl: bool) -> None:
        """`capture`: None where every kernel is launched by itself. `pdl`: programmatic dependent launch."""
        self.embedding = parts.embedding.contiguous()
        self.device = self.embedding.device
        self.layers = [StepLayer.of(layer, parts.num_heads) for layer in parts.layers]
        self.exact = exact
        self._final_gain = parts.norm.weight
        self._head = TiledProjection.of(parts.lm_head)
        self._heads = HeadShape.of(parts)
        self._epsilon = parts.norm.epsilon
        check_norms(parts)
        self._qk_epsilon = next((layer.qk_norm.epsilon for layer in parts.layers if layer.qk_norm is not None), 0.0)
        self._scale = parts.scale
        self._capture = capture
        self._pdl = pdl
        self.max_rows = max_rows
        self._buckets = [rows for rows in BUCKETS if rows < max_rows] + [max_rows]
        table = torch.zeros(len(FIELDS), max_rows, dtype=torch.int64, device=self.device)
        self._table = table
        self.inputs = dict(zip(FIELDS, table, strict=True))
        self._settings = torch.zeros(max_rows, sampling_kernels.SETTINGS, dtype=torch.float64, device=self.device)
        self._unused = self.embedding.new_zeros(2 * len(self.layers) * self._heads.kv_heads * self._heads.size)
        """The cache of padding: one token."""
        self._buffers = StepBuffers(self, max_rows, lambda projection: projection.tile)
        self._logits = torch.zeros(max_rows, self._head.outputs, device=self.device)
        most = max(p.outputs * p.split for layer in self.layers for p in (layer.qkv, layer.output, layer.down))
        row_tiles = -(-max_rows // ROWS)
        self._partials = torch.zeros(most * row_tiles * ROWS, device=self.device)
        self._counters = torch.zeros(most // 64 * row_tiles, dtype=torch.int32, device=self.device)
        self._cos, self._sin = rotary_tables(parts)
        self._capacity = 0
        self._graphs: dict[int, tuple[Callable[[], Tensor], Tensor]] = {}
        self._rows: list[tuple[Any, ...]] = []
        """What the device's tables hold: each row's slot, its next position, and how it is sampled."""
        self._reserve(min(FIRST_CAPACITY, parts.max_position))
        self._write_tables([])

    @property
    def tokens(self) -> Tensor:
        """The tokens that the last step sampled, one a row."""
        return self.inputs["token"]

    def run(self, rows: Sequence[StepRow], tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes one token of each row, which is written to its slot; samples the next one by the settings of its
        reply. Returns the logits and the sampler's results; both are overwritten by the next step.

        `tokens`: on the device, in place of those of the rows. None where the rows have them.
        """
        count = len(rows)
        longest = max(row.chunk.start for row in rows)
        if longest >= self._capacity:
            self._reserve(2 * longest)
        known = [
            (row.chunk.pool, row.chunk.index, row.chunk.start, row.uniform_state, id(row.sampling)) for row in rows
        ]
        if tokens is None:
            self._write_tables(rows)
        elif known != self._rows:
            tokens = tokens[:count].clone() if tokens is self.tokens else tokens
            self._write_tables(rows)
        if tokens is not None and tokens is not self.tokens:
            self.tokens[:count].copy_(tokens)
        self._rows = [(pool, index, position + 1, *rest) for pool, index, position, *rest in known]
        bucket = next(size for size in self._buckets if size >= count)
        logits, results = self._replay(bucket)
        return logits[:count], results[:count]

    def prefill(self, chunks: Sequence[SequenceChunk]) -> None:
        """Computes the keys and values of these tokens, with the bits that they have if computed one by one."""
        tokens = [(chunk, i) for chunk in chunks for i in range(len(chunk.ids))]
        columns = np.zeros((len(FIELDS), len(tokens)), dtype=np.int64)
        columns[0] = [chunk.ids[i] for chunk, i in tokens]
        columns[1] = [chunk.start + i for chunk, i in tokens]
        columns[2] = [chunk.start + chunk.rotary_shift + i for chunk, i in tokens]
        addresses = [self._address(chunk) for chunk in chunks]
        columns[3:6] = np.repeat(np.array(addresses, dtype=np.int64), [len(chunk.ids) for chunk in chunks], axis=0).T
        inputs = dict(zip(FIELDS, to_device(columns, self.device), strict=True))
        buffers = StepBuffers(self, len(tokens), lambda projection: projection.prefill_tile)
        self._embed(inputs, buffers, None)
        for index, layer in enumerate(self.layers):
            self._linear(layer.qkv, buffers.scaled, buffers.qkv, squares=buffers.down_squares, prefill=True)
            self._rotate_and_write(layer, index, inputs, buffers.qkv)
            if index == len(self.layers) - 1:
                return
            first = 0
            for chunk, address in zip(chunks, addresses, strict=True):
                rows = slice(first, first + len(chunk.ids))
                self._attend_prefill(index, chunk, address, buffers.qkv[rows], buffers.attended[rows])
                first += len(chunk.ids)
            self._finish_layer(index, buffers, prefill=True)

    def _reserve(self, tokens: int) -> None:
        """Makes room for the attention over so many tokens. Graphs are captured again."""
        self._capacity = tokens
        self._entries = -(-tokens // step_kernels.TILE)
        heads = self._heads
        entries = self.max_rows * heads.kv_heads * self._entries * heads.padded_group
        self._graphs.clear()
        self._tiles = torch.empty(entries * heads.size, device=self.device)
        self._tile_sums = torch.empty(entries * 2, device=self.device)

    def _write_tables(self, rows: Sequence[StepRow]) -> None:
        columns = np.zeros((len(FIELDS), self.max_rows), dtype=np.int64)
        settings = np.zeros((self.max_rows, sampling_kernels.SETTINGS), dtype=np.float64)
        for i, row in enumerate(rows):
            chunk = row.chunk
            position = chunk.start
            columns[:3, i] = chunk.ids[0], position, position + chunk.rotary_shift
            columns[3:6, i] = self._address(chunk)
            columns[6, i] = np.uint64(row.uniform_state).view(np.int64)
            columns[7:, i] = row.reply_start, 1
            settings[i] = row.settings
        unused = (self._unused.data_ptr(), self._heads.kv_heads * self._heads.size, self._heads.size)
        columns[3:6, len(rows) :] = np.array(unused)[:, None]
        self._table.copy_(to_device(columns, self.device))
        self._settings.copy_(to_device(settings, self.device))

    def _address(self, chunk: SequenceChunk) -> tuple[int, int, int]:
        """Where the keys of the slot's first layer are, and the elements between its layers and between its heads."""
        ((heads, size), buffer), pool = next(iter(chunk.pool.buffers.items())), chunk.pool
        slot = heads * pool.capacity * size
        return (
            buffer.data_ptr() + chunk.index * slot * buffer.element_size(),
            pool.num_slots * slot,
            pool.capacity * size,
        )

    def capture_all(self) -> None:
        """Captures the graphs of all numbers of rows, so that no request waits for one."""
        if self._capture is not None:
            for bucket in self._buckets:
                self._replay(bucket)
            self._rows = []

    def _replay(self, bucket: int) -> tuple[Tensor, Tensor]:
        if self._capture is None:
            return self._logits, self._compute(bucket)
        if bucket not in self._graphs:
            self._compute_for_compilation(bucket)
            results: list[Tensor] = []

            def compute() -> Tensor:
                results.append(self._compute(bucket))
                return results[0]

            self._graphs[bucket] = (self._capture(compute), results[0])
        replay, out = self._graphs[bucket]
        replay()
        return self._logits, out

    def _compute_for_compilation(self, bucket: int) -> None:
        """Kernels can't be compiled while a graph is captured. Leaves the tables and the cache as they are."""
        held, settings = self._table.clone(), self._settings.clone()
        padding = torch.tensor(
            [self._unused.data_ptr(), self._heads.kv_heads * self._heads.size, self._heads.size], device=self.device
        )
        self._table.zero_()
        self._table[3:6] = padding[:, None]
        self._compute(bucket)
        self._table.copy_(held)
        self._settings.copy_(settings)

    def _compute(self, rows: int) -> Tensor:
        buffers = self._buffers
        self._embed(self.inputs, buffers, self._settings, rows)
        vector = rows == 1 and not self.exact
        for index, layer in enumerate(self.layers):
            if vector:
                self._matvec(layer.qkv, buffers.hidden, buffers.qkv, gain=layer.input_gain)
            else:
                self._linear(layer.qkv, buffers.scaled, buffers.qkv, squares=buffers.down_squares, rows=rows)
            self._attend(layer, index, buffers, rows)
            if vector:
                self._matvec(layer.output, buffers.attended, buffers.hidden, residual=True)
                self._matvec(layer.gate_up, buffers.hidden, buffers.gated, gain=layer.post_attention_gain, gated=True)
                self._matvec(layer.down, buffers.gated, buffers.hidden, residual=True)
            else:
                self._finish_layer(index, buffers, rows=rows)
        logits = self._logits[:rows]
        if vector:
            self._matvec(self._head, buffers.hidden, logits, gain=self._final_gain)
        else:
            self._linear(self._head, buffers.scaled, logits, squares=buffers.down_squares, rows=rows)
        results = sampling_kernels.sample_rows(logits, logits, self._settings[:rows])
        step_kernels.advance(results, self.inputs, rows)
        return results

    def _finish_layer(self, index: int, buffers: StepBuffers, rows: int | None = None, prefill: bool = False) -> None:
        """From the attention's result to the next layer's input."""
        layer = self.layers[index]
        last = index == len(self.layers) - 1
        next_gain = self._final_gain if last else self.layers[index + 1].input_gain
        same: dict[str, Any] = {"rows": rows, "prefill": prefill}
        after_attention = (layer.post_attention_gain, buffers.scaled, buffers.output_squares)
        self._linear(layer.output, buffers.attended, buffers.hidden, residual=after_attention, **same)
        self._linear(layer.gate_up, buffers.scaled, buffers.gated, squares=buffers.output_squares, gated=True, **same)
        after_layer = (next_gain, buffers.scaled, buffers.down_squares)
        self._linear(layer.down, buffers.gated, buffers.hidden, residual=after_layer, **same)

    def _embed(
        self, inputs: dict[str, Tensor], buffers: StepBuffers, settings: Tensor | None, rows: int | None = None
    ) -> None:
        hidden = buffers.hidden[:rows]
        gain = self.layers[0].input_gain
        step_kernels.embed(inputs, settings, self.embedding, gain, hidden, buffers.scaled, buffers.down_squares)

    def _linear(
        self,
        projection: TiledProjection,
        x: Tensor,
        out: Tensor,
        squares: Tensor | None = None,
        residual: tuple[Tensor, Tensor, Tensor] | None = None,
        gated: bool = False,
        rows: int | None = None,
        prefill: bool = False,
    ) -> None:
        """`squares`: of x, which lacks a norm. `residual`: the gain of the norm after it, and where its input and the
        partial sums of squares go."""
        tile = projection.prefill_tile if prefill else projection.tile
        rows = len(x) if rows is None else rows
        parts = 0 if squares is None else squares.shape[1]
        gain, scaled, out_squares = (x, out, x) if residual is None else residual
        parallel = projection.split > 1 and not prefill
        programs = -(-rows // tile.rows) * (projection.outputs // tile.outputs) * (projection.split if parallel else 1)
        step_kernels._linear[(programs,)](
            x,
            projection.weight,
            x if projection.bias is None else projection.bias,
            x if squares is None else squares,
            gain,
            out,
            scaled,
            out_squares,
            self._partials,
            self._counters,
            rows,
            self._epsilon,
            N=projection.outputs,
            K=projection.inputs,
            BM=tile.rows,
            BN=tile.outputs,
            BK=tile.depth,
            SPLIT=projection.split,
            PARALLEL=parallel,
            STAGES=tile.stages,
            NT=parts,
            NTP=step_kernels.next_power(max(1, parts)),
            BIAS=projection.bias is not None,
            GLU=gated,
            RESIDUAL=residual is not None,
            DISTANCE=tile.distance,
            EARLY=tile.early,
            **step_kernels.launch_options(self._pdl and not prefill, num_warps=tile.warps),
        )

    def _matvec(
        self,
        projection: TiledProjection,
        x: Tensor,
        out: Tensor,
        gain: Tensor | None = None,
        gated: bool = False,
        residual: bool = False,
    ) -> None:
        shape = projection.vector
        step_kernels._matvec[(projection.outputs // shape.outputs,)](
            x,
            projection.weight,
            x if projection.bias is None else projection.bias,
            x if gain is None else gain,
            out,
            self._epsilon,
            N=projection.outputs,
            K=projection.inputs,
            BN=shape.outputs,
            BK=shape.depth,
            NORM=gain is not None,
            BIAS=projection.bias is not None,
            GLU=gated,
            RESIDUAL=residual,
            AHEAD=shape.ahead,
            PDL=self._pdl,
            num_warps=shape.warps,
            **({"launch_pdl": True} if self._pdl else {}),
        )

    def _attend(self, layer: StepLayer, index: int, buffers: StepBuffers, rows: int) -> None:
        heads, inputs = self._heads, self.inputs
        programs = next(programs for most, programs in PROGRAMS if rows <= most or not most)
        step_kernels._attend[(rows * heads.kv_heads, programs)](
            buffers.qkv,
            inputs["base"],
            inputs["member"],
            inputs["head"],
            inputs["position"],
            inputs["rotary"],
            self._cos,
            self._sin,
            layer.query_gain,
            layer.key_gain,
            self._tiles,
            self._tile_sums,
            index,
            self._entries,
            self._scale,
            self._qk_epsilon,
            PROGRAMS=programs,
            NORM=heads.norm,
            STAGES=2,
            **heads.sizes,
            **step_kernels.launch_options(self._pdl, num_warps=4),
        )
        step_kernels._join[(rows * heads.heads,)](
            self._tiles,
            self._tile_sums,
            inputs["position"],
            buffers.attended,
            self._entries,
            AT_ONCE=8,
            **heads.sizes,
            **step_kernels.launch_options(self._pdl, num_warps=1),
        )

    def _rotate_and_write(self, layer: StepLayer, index: int, inputs: dict[str, Tensor], qkv: Tensor) -> None:
        heads = self._heads
        step_kernels._rotate_and_write[(len(qkv), heads.heads + 2 * heads.kv_heads)](
            qkv,
            inputs["base"],
            inputs["member"],
            inputs["head"],
            inputs["position"],
            inputs["rotary"],
            self._cos,
            self._sin,
            layer.query_gain,
            layer.key_gain,
            index,
            self._qk_epsilon,
            H=heads.heads,
            KVH=heads.kv_heads,
            D=heads.size,
            NORM=heads.norm,
            num_warps=1,
            enable_fp_fusion=False,
        )

    def _attend_prefill(
        self, index: int, chunk: SequenceChunk, address: tuple[int, int, int], qkv: Tensor, out: Tensor
    ) -> None:
        heads = self._heads
        queries = max(1, PREFILL_ROWS // heads.padded_group)
        step_kernels._attend_prefill[(-(-len(qkv) // queries), heads.kv_heads)](
            qkv,
            out,
            *address,
            chunk.start,
            len(chunk.ids),
            index,
            self._scale,
            QUERIES=queries,
            STAGES=2,
            **heads.sizes,
            num_warps=4,
            enable_fp_fusion=False,
        )
