"""The plain decoder with the next tokens of replies computed by compiled code; the rest is done as without it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaver.engines.torch.attention import Plan
from palaver.engines.torch.fused import FusedDecoder
from palaver.engines.torch.lanes import Layout
from palaver.engines.torch.library import NotUnderstood
from palaver.engines.torch.plain import Layer, Matrix, Norm, PlainDecoder

LANES = 16
PANEL = 64
"""Numbers in a vector and outputs in a panel of weights, as in step.c."""
ROWS = 32
"""More rows than that gain nothing: the library's products are as fast then."""
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
        *((name, c_int64) for name in ("rows", "context", "threads")),
    )


@dataclass(slots=True)
class _Rows:
    """Where the rows of a plan are, as step.c reads it: lane, member, head, token, position."""

    plan: Plan
    numbers: np.ndarray[Any, np.dtype[np.int64]]

    def advance(self) -> None:
        """Takes the tokens and positions the plan has now."""
        self.numbers[:, 3] = self.plan.ids.numpy()
        self.numbers[:, 4] = self.plan.positions.numpy()


class CompiledDecoder:
    """Raises NotUnderstood for models whose sizes don't go with step.c."""

    def __init__(self, parts: PlainDecoder, layout: Layout, library: ctypes.CDLL, threads: int) -> None:
        _check(parts, layout)
        self._fused = FusedDecoder(parts)
        self._rotation = parts.rotation
        self._outputs = parts.logits.weight.shape[1]
        self._most = parts.most
        self._kept: list[Any] = []
        """What the compiled code points to."""
        self._halves = bool(library.palaver_halves())
        library.palaver_new.restype = c_void_p
        library.palaver_free.argtypes = (c_void_p,)
        self._step = library.palaver_step
        self._step.restype = None
        self._step.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
        self._free = library.palaver_free
        model = self._model(parts, threads)
        self._decoder = library.palaver_new(ctypes.byref(model))
        if not self._decoder:
            raise MemoryError("no memory for a compiled step")
        self._rows: _Rows | None = None

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._free(self._decoder)

    def __call__(self, plan: Plan) -> Tensor:
        """The logits after each sequence's last token."""
        count = len(plan.runs)
        if plan.ids.shape[0] != count or count > ROWS or plan.furthest >= self._most:
            return self._fused(plan)
        if self._rows is None or self._rows.plan is not plan:
            self._rows = _Rows(plan, _places(plan))
        self._rows.advance()
        turns = self._rotation.all_to(plan.furthest)
        logits = torch.empty((count, self._outputs))
        rows = self._rows.numbers.ctypes.data
        self._step(self._decoder, rows, count, turns.data_ptr(), logits.data_ptr())
        return logits[plan.last] if plan.picks else logits

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
            context=_up(parts.most, LANES),
            threads=threads,
        )

    def _layer(self, layer: Layer, parts: PlainDecoder) -> _Layer:
        return _Layer(
            before=self._norm(layer.before),
            after=self._norm(layer.after),
            queries_keys=_Norm() if layer.queries_keys is None else self._norm(layer.queries_keys),
            project=self._matrix(layer.project),
            output=self._matrix(layer.output),
            gate_up=self._matrix(_gated(layer.gate_up, parts.inner)),
            down=self._matrix(_deeper(layer.down, _up(parts.inner, PANEL // 2))),
        )

    def _norm(self, norm: Norm) -> _Norm:
        return _Norm(self._pointer(norm.weight.contiguous()), norm.epsilon)

    def _matrix(self, matrix: Matrix) -> _Matrix:
        """In panels, in the narrowest type that holds the weights without loss."""
        inputs, out = matrix.weight.shape
        weight = matrix.weight.to(_narrowest(matrix.weight, self._halves))
        weight = torch.nn.functional.pad(weight, (0, -out % PANEL))
        panels = weight.view(inputs, -1, PANEL).transpose(0, 1).contiguous()
        bias = None if matrix.bias is None else self._pointer(matrix.bias.contiguous())
        return _Matrix(self._pointer(panels), bias, inputs, out, _KINDS[panels.dtype])

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _check(parts: PlainDecoder, layout: Layout) -> None:
    """Raises unless the sizes are those step.c is written for."""
    if layout.device.type != "cpu" or layout.dtype != torch.float32:
        raise NotUnderstood("compiled steps are for float32 on the CPU")
    if parts.size % LANES or parts.embedding.shape[1] % LANES:
        raise NotUnderstood(f"compiled steps want sizes that are multiples of {LANES}")
    if set(layout.groups) != {(parts.shared, parts.size)}:
        raise NotUnderstood("its layers differ")
    if not parts.embedding.is_contiguous():
        raise NotUnderstood("its embedding lies otherwise")


def _places(plan: Plan) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows = np.zeros((len(plan.runs), 5), np.int64)
    for row, run in zip(rows, plan.runs, strict=True):
        (group,) = run.bank.groups.values()
        member, lane, head = group.stride()[:3]
        row[:3] = group.data_ptr() + run.index * lane * group.element_size(), member, head
    return rows


def _narrowest(weight: Tensor, halves: bool) -> torch.dtype:
    for dtype in (torch.bfloat16, *((torch.float16,) if halves else ())):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return torch.float32


def _gated(matrix: Matrix, inner: int) -> Matrix:
    """Half a panel of gates, then half a panel of what they let through, and so on."""

    def mixed(both: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(both.unflatten(-1, (2, inner)), (0, -inner % (PANEL // 2)))
        return padded.unflatten(-1, (-1, PANEL // 2)).transpose(-3, -2).flatten(-3).contiguous()

    return Matrix(mixed(matrix.weight), None if matrix.bias is None else mixed(matrix.bias))


def _deeper(matrix: Matrix, inputs: int) -> Matrix:
    """With inputs that count for nothing, up to so many."""
    return Matrix(torch.nn.functional.pad(matrix.weight, (0, 0, 0, inputs - matrix.weight.shape[0])), matrix.bias)


def _up(number: int, to: int) -> int:
    return -(-number // to) * to
