"""The plain decoder in compiled code (step.c): a token's bits depend on the tokens before it and on nothing else."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaver.engines.compiled.build import Library
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.decoders.library import UnsupportedModel
from palaver.engines.torch.decoders.plain import DecoderLayer, Linear, PlainDecoder, RMSNorm
from palaver.engines.torch.tensors import TensorLayout

LANES = 16
PANEL = 64
"""Numbers in a SIMD vector and outputs in a panel of weights, as in step.c."""
MAX_ROWS = 128
"""Rows that one call computes; a larger batch takes several calls."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Matrix(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "dtype")),
    )


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("input_norm", "post_attention_norm", "qk_norm")),
        *((name, _Matrix) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    )


class _Model(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("embedding", c_void_p),
        ("norm", _Norm),
        ("lm_head", _Matrix),
        *((name, c_int64) for name in ("num_layers", "hidden_size", "num_heads")),
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "intermediate_size")),
        ("scale", c_float),
        *((name, c_int64) for name in ("max_rows", "max_threads")),
    )


class _Rows:
    """The rows of a batch, as step.c reads them: slot, member stride, head stride, token, position, needs_logits."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = weakref.ref(batch)  # a strong reference would keep the memory of its pools
        self.array = np.zeros((batch.ids.shape[0], 6), np.int64)
        end = 0
        for chunk in batch.chunks:
            (buffer,) = chunk.pool.buffers.values()
            member_stride, slot_stride, head_stride = buffer.stride()[:3]
            slot = buffer.data_ptr() + chunk.index * slot_stride * buffer.element_size()
            start, end = end, end + len(chunk.ids)
            self.array[start:end, :3] = slot, member_stride, head_stride
            self.array[end - 1, 5] = batch.needs_logits
        inverse = sorted(range(len(batch.order)), key=batch.order.__getitem__)
        self.order = None if inverse == list(range(len(inverse))) else torch.tensor(inverse)
        """The logits row of each sequence, in the order the sequences were given."""

    def belong_to(self, batch: ForwardBatch) -> bool:
        return self._batch() is batch

    def copy_inputs(self, batch: ForwardBatch) -> None:
        """Copies the tokens and positions that the batch has now."""
        self.array[:, 3] = batch.ids.numpy()
        self.array[:, 4] = batch.positions.numpy()


class CompiledDecoder:
    """Raises UnsupportedModel for models whose sizes step.c can't compute."""

    pair_bytes = 0
    """Attention builds no matrix of scores."""

    def __init__(self, parts: PlainDecoder, layout: TensorLayout, library: Library, threads: int) -> None:
        _check(parts, layout)
        self._rotary = parts.rotary
        self._vocabulary_size = parts.lm_head.weight.shape[1]
        self._references: list[Any] = []
        """The memory that the compiled code points to."""
        functions = library.functions
        self._has_float16 = bool(functions.palaver_has_float16())
        functions.palaver_new.restype = c_void_p
        functions.palaver_free.argtypes = (c_void_p,)
        self._step = functions.palaver_step
        self._step.restype = None
        self._step.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)
        self._free = functions.palaver_free
        model = self._model(parts, threads)
        self._decoder = functions.palaver_new(ctypes.byref(model))
        if not self._decoder:
            raise MemoryError("no memory for a compiled step")
        self._rows: _Rows | None = None

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._free(self._decoder)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where the batch needs none."""
        rows = self._rows
        if rows is None or not rows.belong_to(batch):
            rows = self._rows = _Rows(batch)
        rows.copy_inputs(batch)
        rotations = self._rotary.complex_table(batch.max_position).data_ptr()
        count = len(batch.chunks) if batch.needs_logits else 0
        logits = torch.empty((count, self._vocabulary_size), dtype=torch.float32, device="cpu")
        done, threads = 0, torch.get_num_threads()
        for start in range(0, len(rows.array), MAX_ROWS):
            part = rows.array[start : start + MAX_ROWS]
            out = logits.data_ptr() + done * self._vocabulary_size * logits.element_size()
            self._step(self._decoder, part.ctypes.data, len(part), rotations, out, threads)
            done += int(part[:, 5].sum()) if len(part) < len(rows.array) else 0
        return logits if rows.order is None or not batch.needs_logits else logits[rows.order]

    def _model(self, parts: PlainDecoder, threads: int) -> _Model:
        layers = (_Layer * len(parts.layers))(*(self._layer(layer, parts) for layer in parts.layers))
        self._references.append(layers)
        return _Model(
            layers=layers,
            embedding=self._pointer(parts.embedding),
            norm=self._norm(parts.norm),
            lm_head=self._matrix(parts.lm_head),
            num_layers=len(parts.layers),
            hidden_size=parts.embedding.shape[1],
            num_heads=parts.num_heads,
            num_kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            intermediate_size=_round_up(parts.intermediate_size, PANEL // 2),
            scale=parts.scale,
            max_rows=MAX_ROWS,
            max_threads=threads,
        )

    def _layer(self, layer: DecoderLayer, parts: PlainDecoder) -> _Layer:
        return _Layer(
            input_norm=self._norm(layer.input_norm),
            post_attention_norm=self._norm(layer.post_attention_norm),
            qk_norm=_Norm() if layer.qk_norm is None else self._norm(layer.qk_norm),
            qkv_proj=self._matrix(layer.qkv_proj),
            o_proj=self._matrix(layer.o_proj),
            gate_up_proj=self._matrix(_interleave_gates(layer.gate_up_proj, parts.intermediate_size)),
            down_proj=self._matrix(_pad_inputs(layer.down_proj, _round_up(parts.intermediate_size, PANEL // 2))),
        )

    def _norm(self, norm: RMSNorm) -> _Norm:
        return _Norm(self._pointer(norm.weight.contiguous()), norm.epsilon)

    def _matrix(self, matrix: Linear) -> _Matrix:
        """In panels, in the narrowest dtype that holds the weights without loss."""
        inputs, outputs = matrix.weight.shape
        weight = matrix.weight.to(_narrowest_dtype(matrix.weight, self._has_float16))
        weight = torch.nn.functional.pad(weight, (0, -outputs % PANEL))
        panels = _interleave_vectors(weight.view(inputs, -1, PANEL).transpose(0, 1)).contiguous()
        bias = None if matrix.bias is None else self._pointer(matrix.bias.contiguous())
        return _Matrix(self._pointer(panels), bias, inputs, outputs, _DTYPES[panels.dtype])

    def _pointer(self, tensor: Tensor) -> int:
        self._references.append(tensor)
        return tensor.data_ptr()


def _check(parts: PlainDecoder, layout: TensorLayout) -> None:
    """Raises unless step.c can compute these sizes."""
    if layout.device.type != "cpu" or layout.dtype != torch.float32:
        raise UnsupportedModel("compiled steps are for float32 on the CPU")
    if parts.head_dim % LANES or parts.embedding.shape[1] % LANES:
        raise UnsupportedModel(f"compiled steps want sizes that are multiples of {LANES}")
    if set(layout.shape_counts) != {(parts.num_kv_heads, parts.head_dim)}:
        raise UnsupportedModel("its layers differ")
    if not parts.embedding.is_contiguous():
        raise UnsupportedModel("its embedding lies otherwise")


def _narrowest_dtype(weight: Tensor, has_float16: bool) -> torch.dtype:
    for dtype in (torch.bfloat16, *((torch.float16,) if has_float16 else ())):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return torch.float32


def _interleave_vectors(panels: Tensor) -> Tensor:
    """Interleaves each two vectors of bfloat16: a shift and a mask then widen them."""
    if panels.dtype != torch.bfloat16:
        return panels
    return panels.unflatten(-1, (-1, 2, LANES)).transpose(-1, -2).flatten(-3)


def _interleave_gates(matrix: Linear, intermediate_size: int) -> Linear:
    """In each panel, first half a panel of gates, then the half panel of up-projections that they scale."""

    def interleave(both: Tensor) -> Tensor:
        padding = -intermediate_size % (PANEL // 2)
        padded = torch.nn.functional.pad(both.unflatten(-1, (2, intermediate_size)), (0, padding))
        return padded.unflatten(-1, (-1, PANEL // 2)).transpose(-3, -2).flatten(-3).contiguous()

    return Linear(interleave(matrix.weight), None if matrix.bias is None else interleave(matrix.bias))


def _pad_inputs(matrix: Linear, inputs: int) -> Linear:
    """Pads the matrix with zeros to so many inputs."""
    return Linear(torch.nn.functional.pad(matrix.weight, (0, 0, 0, inputs - matrix.weight.shape[0])), matrix.bias)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
