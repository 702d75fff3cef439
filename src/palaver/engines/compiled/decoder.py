"""The plain decoder by compiled code: what is computed for a token depends on those before it and on nothing else."""

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
from palaver.engines.torch.kv_cache import KVLayout

LANES = 16
PANEL = 64
"""Numbers in a vector and outputs in a panel of weights, as in step.c."""
ROWS = 128
"""Computed in one call; more are computed in several."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Matrix(Structure):
    _fields_ = (("weights", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("out", c_int64), ("kind", c_int64))


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before", "after", "queries_keys")),
        *((name, _Matrix) for name in ("project", "output", "gate_up", "down")),
    )


class _Model(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("embedding", c_void_p),
        ("norm", _Norm),
        ("logits", _Matrix),
        *((name, c_int64) for name in ("depth", "hidden", "heads", "shared", "size", "inner")),
        ("scale", c_float),
        *((name, c_int64) for name in ("rows", "threads")),
    )


class _Rows:
    """The rows of a plan, as step.c reads them: lane, member, head, token, position, asked."""

    def __init__(self, plan: ForwardBatch) -> None:
        self._plan = weakref.ref(plan)  # whoever holds a plan holds the memory of its lanes
        self.numbers = np.zeros((plan.ids.shape[0], 6), np.int64)
        end = 0
        for run in plan.runs:
            (group,) = run.bank.groups.values()
            member, lane, head = group.stride()[:3]
            start, end = end, end + len(run.ids)
            self.numbers[start:end, :3] = group.data_ptr() + run.index * lane * group.element_size(), member, head
            self.numbers[end - 1, 5] = plan.asked
        backwards = sorted(range(len(plan.order)), key=plan.order.__getitem__)
        self.order = None if backwards == list(range(len(backwards))) else torch.tensor(backwards)
        """Where the logits of each sequence are, in the order the sequences were given."""

    def are_of(self, plan: ForwardBatch) -> bool:
        return self._plan() is plan

    def advance(self, plan: ForwardBatch) -> None:
        """Takes the tokens and positions the plan has now."""
        self.numbers[:, 3] = plan.ids.numpy()
        self.numbers[:, 4] = plan.positions.numpy()


class CompiledDecoder:
    """Raises NotUnderstood for models whose sizes don't go with step.c."""

    pair_bytes = 0
    """Attention builds no matrix of scores."""

    def __init__(self, parts: PlainDecoder, layout: KVLayout, library: Library, threads: int) -> None:
        _check(parts, layout)
        self._rotation = parts.rotation
        self._outputs = parts.logits.weight.shape[1]
        self._kept: list[Any] = []
        """What the compiled code points to."""
        functions = library.functions
        self._halves = bool(functions.palaver_halves())
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

    def __call__(self, plan: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token; none where they are not asked for."""
        rows = self._rows
        if rows is None or not rows.are_of(plan):
            rows = self._rows = _Rows(plan)
        rows.advance(plan)
        turns = self._rotation.all_to(plan.furthest).data_ptr()
        logits = torch.empty((len(plan.runs) if plan.asked else 0, self._outputs), dtype=torch.float32, device="cpu")
        done, threads = 0, torch.get_num_threads()
        for start in range(0, len(rows.numbers), ROWS):
            part = rows.numbers[start : start + ROWS]
            out = logits.data_ptr() + done * self._outputs * logits.element_size()
            self._step(self._decoder, part.ctypes.data, len(part), turns, out, threads)
            done += int(part[:, 5].sum()) if len(part) < len(rows.numbers) else 0
        return logits if rows.order is None or not plan.asked else logits[rows.order]

    def _model(self, parts: PlainDecoder, threads: int) -> _Model:
        layers = (_Layer * len(parts.layers))(*(self._layer(layer, parts) for layer in parts.layers))
        self._kept.append(layers)
        inner = _up(parts.inner, PANEL // 2)
        return _Model(
            layers=layers,
            embedding=self._pointer(parts.embedding),
            norm=self._norm(parts.norm),
            logits=self._matrix(parts.logits),
            depth=len(parts.layers),
            hidden=parts.embedding.shape[1],
            heads=parts.heads,
            shared=parts.shared,
            size=parts.size,
            inner=inner,
            scale=parts.scale,
            rows=ROWS,
            threads=threads,
        )

    def _layer(self, layer: DecoderLayer, parts: PlainDecoder) -> _Layer:
        return _Layer(
            before=self._norm(layer.before),
            after=self._norm(layer.after),
            queries_keys=_Norm() if layer.queries_keys is None else self._norm(layer.queries_keys),
            project=self._matrix(layer.project),
            output=self._matrix(layer.output),
            gate_up=self._matrix(_gated(layer.gate_up, parts.inner)),
            down=self._matrix(_deeper(layer.down, _up(parts.inner, PANEL // 2))),
        )

    def _norm(self, norm: RMSNorm) -> _Norm:
        return _Norm(self._pointer(norm.weight.contiguous()), norm.epsilon)

    def _matrix(self, matrix: Linear) -> _Matrix:
        """In panels, in the narrowest type that holds the weights without loss."""
        inputs, out = matrix.weight.shape
        weight = matrix.weight.to(_narrowest(matrix.weight, self._halves))
        weight = torch.nn.functional.pad(weight, (0, -out % PANEL))
        panels = _interleaved(weight.view(inputs, -1, PANEL).transpose(0, 1)).contiguous()
        bias = None if matrix.bias is None else self._pointer(matrix.bias.contiguous())
        return _Matrix(self._pointer(panels), bias, inputs, out, _KINDS[panels.dtype])

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _check(parts: PlainDecoder, layout: KVLayout) -> None:
    """Raises unless the sizes are those step.c is written for."""
    if layout.device.type != "cpu" or layout.dtype != torch.float32:
        raise UnsupportedModel("compiled steps are for float32 on the CPU")
    if parts.size % LANES or parts.embedding.shape[1] % LANES:
        raise UnsupportedModel(f"compiled steps want sizes that are multiples of {LANES}")
    if set(layout.groups) != {(parts.shared, parts.size)}:
        raise UnsupportedModel("its layers differ")
    if not parts.embedding.is_contiguous():
        raise UnsupportedModel("its embedding lies otherwise")


def _narrowest(weight: Tensor, halves: bool) -> torch.dtype:
    for dtype in (torch.bfloat16, *((torch.float16,) if halves else ())):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return torch.float32


def _interleaved(panels: Tensor) -> Tensor:
    """Of bfloat16 each two vectors with their numbers in turn, which a processor takes apart quickly."""
    if panels.dtype != torch.bfloat16:
        return panels
    return panels.unflatten(-1, (-1, 2, LANES)).transpose(-1, -2).flatten(-3)


def _gated(matrix: Linear, inner: int) -> Linear:
    """Half a panel of gates, then half a panel of what they let through, and so on."""

    def mixed(both: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(both.unflatten(-1, (2, inner)), (0, -inner % (PANEL // 2)))
        return padded.unflatten(-1, (-1, PANEL // 2)).transpose(-3, -2).flatten(-3).contiguous()

    return Linear(mixed(matrix.weight), None if matrix.bias is None else mixed(matrix.bias))


def _deeper(matrix: Linear, inputs: int) -> Linear:
    """With inputs that count for nothing, up to so many."""
    return Linear(torch.nn.functional.pad(matrix.weight, (0, 0, 0, inputs - matrix.weight.shape[0])), matrix.bias)


def _up(number: int, to: int) -> int:
    return -(-number // to) * to
