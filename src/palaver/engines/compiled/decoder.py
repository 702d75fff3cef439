"""The decoder in compiled code (step.c), and its runner: a token's bits depend on the tokens before it and on
nothing else. Keys and values are numpy arrays."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palaver.engines.compiled.build import Library
from palaver.engines.compiled.weights import (
    FLOAT_ARRAYS,
    QUANTISED,
    DecoderWeights,
    LayerWeights,
    NormWeights,
    Projection,
    Weight,
)
from palaver.engines.core.decoder_config import CLAMPED_SWIGLU, GELU_TANH, DecoderConfig, ExpertSizes, Frequencies
from palaver.engines.core.kv_cache import HostArray, HostMemory, KVLayout, Slot, SlotPool, aligned_zeros
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import SlotRunner, ThreadCounts, UnsupportedModel
from palaver.engines.core.sampler import HostLogits
from palaver.engines.machine import all_cores, usable_cores

LANES = 16
PANEL = 64
"""Numbers in a SIMD vector and outputs in a panel of weights, as in step.c."""
MAX_ROWS = 128
"""Rows that one call computes; a larger batch takes several calls."""
TABLE_VERSION = 2
"""Part of fingerprints: raise it where the numbers of `RotaryTable` may change."""
MIN_POSITIONS = 1024
_DTYPES = {name: number for number, name in enumerate((*FLOAT_ARRAYS, *QUANTISED))}
"""The numbers of the types of weights, as in panels.h."""
_ACTIVATIONS = {"silu": 0, GELU_TANH: 1, CLAMPED_SWIGLU: 2}
"""The numbers of activations, as in step.c."""
QKV_PARTS = 3
NO_WINDOW = 1 << 30
"""So many keys are all; with more, step.c's integers of 32 bits would overflow."""
PACKED_OUTPUTS = 16 * PANEL
"""Outputs of a matrix that one call packs."""
LOAD = Path("/proc/loadavg")
"""In which Linux says how many tasks it wants to run."""


class RotaryTable:
    """The cosine and the sine of each pair at each position, side by side: float32 [positions, pairs, 2].

    Angles are float32 products, as in the transformers library; their cosines and sines are rounded once."""

    def __init__(self, frequencies: Frequencies, max_position: int) -> None:
        self._frequencies = frequencies
        self._max_position = max_position
        self._table = np.empty((0, len(frequencies.angles), 2), np.float32)

    def up_to(self, position: int) -> HostArray:
        """The table with this position in it; a later position may replace it."""
        if position >= len(self._table):
            most = min(self._max_position, max(2 * position, MIN_POSITIONS))
            self._table = self._build(max(position, most) + 1)
        return self._table

    def _build(self, positions: int) -> HostArray:
        angles = np.arange(positions, dtype=np.float32)[:, None] * self._frequencies.angles
        exact, scaling = angles.astype(np.float64), np.float32(self._frequencies.scaling)
        table = np.empty((*angles.shape, 2), np.float32)
        table[..., 0] = np.cos(exact).astype(np.float32) * scaling
        table[..., 1] = np.sin(exact).astype(np.float32) * scaling
        return table


class _Matrix(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "dtype")),
    )


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "post_attention_norm", "qk_norm", "output_norm", "result_norm")),
        ("qkv_proj", _Matrix * QKV_PARTS),
        ("o_proj", _Matrix),
        ("router", _Matrix),
        ("gate_up_proj", _Matrix * 2),
        ("down_proj", _Matrix),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("window", "rotary")),
    )


class _Model(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("embedding", _Matrix),
        ("norm", _Norm),
        ("lm_head", _Matrix),
        *((name, c_int64) for name in ("num_layers", "hidden_size", "num_heads")),
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "intermediate_size")),
        *((name, c_float) for name in ("scale", "embedding_scale", "score_cap", "logit_cap")),
        *((name, c_int64) for name in ("activation", "num_experts", "experts_per_token", "weighs_all")),
        *((name, c_int64) for name in ("max_rows", "max_threads")),
    )


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes and settings of a decoder, as in `DecoderConfig`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    activation: str = "silu"
    embedding_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    experts: ExpertSizes | None = None

    @classmethod
    def of(cls, config: DecoderConfig) -> DecoderSizes:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def check(self, hidden_size: int) -> None:
        """Raises UnsupportedModel unless step.c can compute these sizes."""
        if self.head_dim % LANES or hidden_size % LANES:
            raise UnsupportedModel(f"compiled steps need sizes that are multiples of {LANES}")
        if self.experts is not None and (self.intermediate_size % PANEL or hidden_size % PANEL):
            raise UnsupportedModel(f"compiled steps need experts with sizes that are multiples of {PANEL}")


class RowChunk(NamedTuple):
    """The next tokens of one sequence."""

    slot: Slot[HostArray]
    start: int
    ids: Sequence[int]
    rotary_shift: int = 0
    """The rotary position of its tokens, less their position."""
    rotations: HostArray | None = None
    """Those of its tokens, [tokens, pairs, 2], where they don't follow from the rotary position."""
    embeddings: Sequence[tuple[int, HostArray]] = ()
    """Of tokens that stand for media, [tokens, size], each with the first of these tokens, counted from the start."""


class Rows:
    """The new tokens of several sequences, as step.c reads them: slot, member stride, head stride, token, position,
    needs_logits, rotary position, embedding, rotations. Holds references to the memory that they point to: the pools of
    the slots, and what media bring."""

    def __init__(self, chunks: Sequence[RowChunk], need_logits: bool, drafts: Sequence[Sequence[int]] = ()) -> None:
        """`drafts`: the tokens at the end of each chunk that are drafts. Logits are needed after each of these, too."""
        self._places: list[tuple[SlotPool[HostArray], int]] = [(chunk.slot.pool, chunk.slot.index) for chunk in chunks]
        self._media = [(chunk.rotations, chunk.embeddings) for chunk in chunks if chunk.rotations is not None]
        self.is_decode = need_logits and all(len(chunk.ids) == 1 for chunk in chunks)
        self.num_logits = len(chunks) if need_logits else 0
        self.max_position = max(chunk.start + len(chunk.ids) for chunk in chunks) - 1
        self.array = np.zeros((sum(len(chunk.ids) for chunk in chunks), 9), np.int64)
        end = 0
        for slot, position, ids, shift, rotations, embeddings in chunks:
            (buffer,) = slot.pool.buffers.values()
            member_stride, slot_stride, head_stride = (stride // buffer.itemsize for stride in buffer.strides[:3])
            start, end = end, end + len(ids)
            self.array[start:end, 0] = buffer.ctypes.data + slot.index * slot_stride * buffer.itemsize
            self.array[start:end, 1:3] = member_stride, head_stride
            self.array[start:end, 3] = ids
            self.array[start:end, 4] = range(position, position + len(ids))
            self.array[end - 1, 5] = need_logits
            self.array[start:end, 6] = self.array[start:end, 4] + shift
            if rotations is not None:
                self._point_to(start, 8, rotations)
            for first, values in embeddings:
                self._point_to(start + first, 7, values)
        if drafts:
            self._need_logits(chunks, drafts)
        self.max_rotary_position = int(self.array[:, 6].max())

    def _need_logits(self, chunks: Sequence[RowChunk], drafts: Sequence[Sequence[int]]) -> None:
        end = 0
        for chunk, draft in zip(chunks, drafts, strict=True):
            end += len(chunk.ids)
            self.array[end - 1 - len(draft) : end, 5] = True
        self.num_logits = int(self.array[:, 5].sum())

    def _point_to(self, row: int, column: int, values: HostArray) -> None:
        """The rows from this one on point to the values, one each."""
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        self.array[row : row + len(values), column] = values.ctypes.data + values.strides[0] * np.arange(len(values))

    def advance(self, chunks: Sequence[RowChunk]) -> bool:
        """Becomes the rows of these chunks where they are the next single tokens of the same slots; cheaper than new
        rows. Returns False, and changes nothing, where they are not."""
        if not self.is_decode or self._media or len(chunks) != len(self._places):
            return False
        positions, rotary = self.array[:, 4].tolist(), self.array[:, 6].tolist()
        for (pool, index), before, turned, chunk in zip(self._places, positions, rotary, chunks, strict=True):
            if chunk.slot.pool is not pool or chunk.slot.index != index or chunk.start != before + 1:
                return False
            if len(chunk.ids) != 1 or chunk.rotations is not None or chunk.rotary_shift != turned - before:
                return False
        self.array[:, 3] = [chunk.ids[0] for chunk in chunks]
        self.array[:, 4] += 1
        self.array[:, 6] += 1
        self.max_position += 1
        self.max_rotary_position += 1
        return True


class CompiledDecoder:
    """Raises UnsupportedModel for models whose sizes step.c can't compute."""

    def __init__(
        self,
        weights: DecoderWeights,
        sizes: DecoderSizes,
        rotary: RotaryTable,
        library: Library,
        max_threads: int,
        local_rotary: RotaryTable | None = None,
    ) -> None:
        """`local_rotary`: for the layers that name the second table."""
        self._vocabulary_size, self._hidden_size = weights.lm_head.weight.shape
        sizes.check(self._hidden_size)
        self.rotary = rotary
        self._local_rotary = local_rotary or rotary
        self._sizes = sizes
        self._references: list[Any] = []
        """The memory that the compiled code points to."""
        functions = library.functions
        functions.palaver_new.restype = c_void_p
        functions.palaver_free.argtypes = (c_void_p,)
        self._step = functions.palaver_step
        self._step.restype = None
        self._step.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)
        self._free = functions.palaver_free
        with ThreadPoolExecutor(max_threads) as pool:
            model = self._model(weights, max_threads, WeightPacker(functions, pool))
        self._decoder = functions.palaver_new(ctypes.byref(model))
        if not self._decoder:
            raise MemoryError("no memory for a compiled step")

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._free(self._decoder)

    def run(self, rows: Rows, threads: int, memory: HostArray | None = None) -> HostArray:
        """The logits after each sequence's last token; none where the rows need none. They are written to `memory`,
        if it is given and has room for them."""
        tables = [one.up_to(rows.max_rotary_position) for one in (self.rotary, self._local_rotary)]
        rotations = (c_void_p * len(tables))(*(table.ctypes.data for table in tables))
        if memory is None or len(memory) < rows.num_logits:
            memory = np.empty((rows.num_logits, self._vocabulary_size), np.float32)
        logits = memory[: rows.num_logits]
        array, done = rows.array, 0
        for start in range(0, len(array), MAX_ROWS):
            part = array[start : start + MAX_ROWS]
            out = logits.ctypes.data + done * self._vocabulary_size * logits.itemsize
            self._step(self._decoder, part.ctypes.data, len(part), rotations, out, threads)
            done += int(part[:, 5].sum()) if len(part) < len(array) else 0
        return logits

    def _model(self, weights: DecoderWeights, max_threads: int, packer: WeightPacker) -> _Model:
        sizes = self._sizes
        layers = [self._layer(layer, packer) for layer in weights.layers]
        shape = (sizes.num_kv_heads, sizes.head_dim)
        self.layout = KVLayout(((shape, shape),) * len(layers), HostMemory())
        array = (_Layer * len(layers))(*layers)
        self._references.append(array)
        lm_head = self._matrix(weights.lm_head, packer)
        tied = weights.embedding is weights.lm_head.weight
        return _Model(
            layers=array,
            embedding=lm_head if tied else self._matrix(Projection(weights.embedding), packer),
            norm=self._norm(weights.norm),
            lm_head=lm_head,
            num_layers=len(layers),
            hidden_size=self._hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate_size,
            scale=sizes.scale,
            embedding_scale=sizes.embedding_scale,
            score_cap=sizes.score_cap,
            logit_cap=sizes.logit_cap,
            activation=_ACTIVATIONS[sizes.activation],
            **_expert_fields(sizes.experts),
            max_rows=MAX_ROWS,
            max_threads=max_threads,
        )

    def _layer(self, layer: LayerWeights, packer: WeightPacker) -> _Layer:
        return _Layer(
            input_norm=self._norm(layer.input_norm),
            post_attention_norm=self._norm(layer.post_attention_norm),
            qk_norm=self._norm(layer.qk_norm),
            output_norm=self._norm(layer.output_norm),
            result_norm=self._norm(layer.result_norm),
            qkv_proj=(_Matrix * QKV_PARTS)(*(self._matrix(part, packer) for part in layer.qkv)),
            o_proj=self._matrix(layer.output, packer),
            router=_Matrix() if layer.router is None else self._matrix(layer.router, packer),
            gate_up_proj=(_Matrix * 2)(self._matrix(layer.gate, packer), self._matrix(layer.up, packer)),
            down_proj=self._matrix(layer.down, packer),
            sinks=None if layer.sinks is None else self._pointer(layer.sinks),
            window=min(layer.window or NO_WINDOW, NO_WINDOW),
            rotary=layer.rotary,
        )

    def _norm(self, norm: NormWeights | None) -> _Norm:
        return _Norm() if norm is None else _Norm(self._pointer(norm.weight), norm.epsilon)

    def _matrix(self, projection: Projection, packer: WeightPacker) -> _Matrix:
        """In panels, in the narrowest type that holds the weights without loss."""
        weight, bias = projection.weight.narrowed(), None
        outputs, inputs = weight.shape
        if projection.bias is not None:  # as long as whole panels
            bias = self._pointer(np.pad(projection.bias, (0, -outputs % PANEL)))
        return _Matrix(self._pointer(packer.pack(weight)), bias, inputs, outputs, _DTYPES[weight.dtype])

    def _pointer(self, array: NDArray[Any]) -> int:
        array = np.ascontiguousarray(array)
        self._references.append(array)
        return array.ctypes.data


def _expert_fields(experts: ExpertSizes | None) -> dict[str, int]:
    if experts is None:
        return {}
    return {
        "num_experts": experts.count,
        "experts_per_token": experts.per_token,
        "weighs_all": int(experts.weighs_all),
    }


class WeightPacker:
    """Packs matrices into panels, several parts of a matrix at once."""

    def __init__(self, functions: ctypes.CDLL, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._pack = functions.palaver_pack
        self._pack.restype = None
        self._pack.argtypes = (c_int64, c_void_p, c_int64, c_int64, c_void_p)
        self._packed_bytes = functions.palaver_packed_bytes
        self._packed_bytes.restype = c_int64
        self._packed_bytes.argtypes = (c_int64, c_int64, c_int64)

    def pack(self, weight: Weight) -> NDArray[np.uint8]:
        dtype, (outputs, inputs) = _DTYPES[weight.dtype], weight.shape
        rows = np.require(weight.array, requirements=("C_CONTIGUOUS", "ALIGNED"))
        packed = aligned_zeros((self._packed_bytes(dtype, outputs, inputs),), np.uint8)
        panel_bytes = self._packed_bytes(dtype, PANEL, inputs)

        def pack(start: int) -> None:
            target = packed.ctypes.data + start // PANEL * panel_bytes
            source = rows.ctypes.data + start * rows.strides[0]
            self._pack(dtype, source, min(PACKED_OUTPUTS, outputs - start), inputs, target)

        for _ in self._pool.map(pack, range(0, outputs, PACKED_OUTPUTS)):
            pass
        return packed


class IdleCores:
    """Counts the cores that run nothing at this moment, from the number of tasks that Linux wants to run."""

    def __init__(self, load: Path = LOAD) -> None:
        self._usable = usable_cores()
        self._all = all_cores()
        self._descriptor: int | None = None
        if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == self._all:
            with suppress(OSError):  # not Linux
                self._descriptor = os.open(load, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._descriptor)

    def count(self) -> int | None:
        """At most the usable cores but the one of this thread. None where it is unknown: on other systems, and where
        other processes run on cores that this one may not use. Takes a microsecond."""
        if self._descriptor is None:
            return None
        try:
            running = int(os.pread(self._descriptor, 64, 0).split()[3].partition(b"/")[0])
        except (OSError, ValueError, IndexError):
            return None
        if running < 1:  # at least this thread runs: some sandboxes count nothing
            return None
        return max(0, min(self._all - running, self._usable - 1))


class CompiledRunner(SlotRunner[HostArray]):
    prefills_last_token = True

    def __init__(
        self,
        decoder: CompiledDecoder,
        cache_bytes: int,
        context_length: int,
        threads: ThreadCounts,
        speculate: bool = True,
    ) -> None:
        super().__init__(decoder.layout, cache_bytes, context_length)
        if speculate:
            self.verify_drafts = self._verify_drafts
            self.drafts_after_prompts = True
        self._decoder = decoder
        self._threads = threads
        self._idle_cores = IdleCores()
        self._decode_rows: Rows | None = None
        """The rows of the last decode pass, which the next pass of the same sequences reuses."""
        self._draft_logits: HostArray | None = None
        """Those of the last draft, in memory that the next one reuses: new memory costs a page fault for each 4 KiB."""

    def _drop_decode_batch(self) -> None:
        self._decode_rows = None

    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> HostLogits:
        chunks = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.computed_tokens
            chunks.append(self._chunk(sequence, sequence.token_ids[start : start + count]))
        rows = self._decode_rows
        if not need_logits or rows is None or not rows.advance(chunks):
            rows = Rows(chunks, need_logits)
            if rows.is_decode:  # a prefill in between leaves the rows of the replies
                self._decode_rows = rows
        return self._run_rows(rows)

    def _chunk(self, sequence: SequenceState, ids: Sequence[int]) -> RowChunk:
        """The next tokens of a sequence."""
        return RowChunk(self._slots[sequence], sequence.computed_tokens, ids)

    def _verify_drafts(self, sequences: Sequence[SequenceState], drafts: Sequence[Sequence[int]]) -> HostLogits:
        counts = [sequence.pending_tokens for sequence in sequences]
        self._grow_slots(sequences, [count + len(draft) for count, draft in zip(counts, drafts, strict=True)])
        chunks = [
            self._chunk(sequence, [*sequence.token_ids[-count:], *draft])
            for sequence, count, draft in zip(sequences, counts, drafts, strict=True)
        ]
        logits = self._run_rows(Rows(chunks, need_logits=True, drafts=drafts), self._draft_logits)
        if self._draft_logits is None or len(self._draft_logits) < len(logits):
            self._draft_logits = logits.array
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.computed_tokens += count
        return logits

    def _run_rows(self, rows: Rows, memory: HostArray | None = None) -> HostLogits:
        began = time.thread_time()
        logits = self._decoder.run(rows, self._thread_count(rows), memory)
        self.forward_seconds += time.thread_time() - began
        return HostLogits(logits)

    def _thread_count(self, rows: Rows) -> int:
        """A pass of a small model with several rows gets all idle cores; a single row leaves them to the server and its
        reader."""
        counts = self._threads
        if len(rows.array) > 1 and counts.small_pass < counts.large_pass:
            idle = self._idle_cores.count()
            if idle is not None:
                return min(counts.large_pass, 1 + idle)
        return counts.for_pairs(len(rows.array) * rows.max_position)
