"""The quantised types of GGUF files, by ggml's published layouts: plain encoders, and what blocks stand for.

The encoders don't search for the best scales, as llama.cpp's do. The tests compare the decoders with ggml's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
BLOCKS = {
    "q8_0": 32,
    "q4_0": 32,
    "q4_1": 32,
    "q5_0": 32,
    "q5_1": 32,
    "q4_k": 256,
    "q5_k": 256,
    "q6_k": 256,
    "mxfp4": 32,
}
"""Values of a block."""
BLOCK_BYTES = {
    "q8_0": 34,
    "q4_0": 18,
    "q4_1": 20,
    "q5_0": 22,
    "q5_1": 24,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "mxfp4": 17,
}
MXFP4_NUMBERS = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
"""Doubled."""


def quantise(kind: str, values: Array) -> Array:
    """Blocks as bytes, [blocks, bytes]."""
    return _ENCODERS[kind](np.ascontiguousarray(values, np.float32).reshape(-1, BLOCKS[kind]))


def dequantise(kind: str, data: Array) -> Array:
    """The float32 numbers that blocks stand for, [blocks, values]."""
    return _DECODERS[kind](np.ascontiguousarray(data).view(np.uint8).reshape(-1, BLOCK_BYTES[kind]))


def _inverse(scales: Array) -> Array:
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _halves(numbers: Array) -> Array:
    return numbers.astype(np.float16).view(np.uint8).reshape(len(numbers), -1)


def _floats(data: Array) -> Array:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _rounded(numbers: Array, most: int) -> Array:
    return np.clip(np.round(numbers), 0, most).astype(np.uint8)


def _join_nibbles(quants: Array) -> Array:
    """Two halves of a block, the first in the lower four bits."""
    half = quants.shape[1] // 2
    return (quants[:, :half] & 15) | (quants[:, half:] & 15) << 4


def _split_nibbles(data: Array) -> Array:
    return np.concatenate((data & 15, data >> 4), axis=1)


def _encode_q8_0(blocks: Array) -> Array:
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    rounded = np.round(blocks * _inverse(scales)).astype(np.int8)
    return np.concatenate((_halves(scales), rounded.view(np.uint8)), axis=1)


def _decode_q8_0(data: Array) -> Array:
    return _floats(data[:, :2]) * np.ascontiguousarray(data[:, 2:]).view(np.int8).astype(np.float32)


def _symmetric(blocks: Array, zero: int) -> tuple[Array, Array]:
    """The value that is farthest from 0 becomes the lowest number."""
    scales = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1) / -zero
    return scales, np.clip(np.floor(blocks * _inverse(scales) + zero + 0.5), 0, 2 * zero - 1).astype(np.uint8)


def _asymmetric(blocks: Array, most: int) -> tuple[Array, Array, Array]:
    low = blocks.min(1, keepdims=True)
    scales = (blocks.max(1, keepdims=True) - low) / most
    return scales, low, _rounded((blocks - low) * _inverse(scales), most)


def _fifth_bits(quants: Array) -> Array:
    """A bit for each of 32 numbers, in four bytes."""
    return np.packbits(quants >> 4, axis=1, bitorder="little")


def _with_fifth_bits(quants: Array, data: Array) -> Array:
    return quants | np.unpackbits(data, axis=1, bitorder="little") << 4


def _encode_q4_0(blocks: Array) -> Array:
    scales, quants = _symmetric(blocks, 8)
    return np.concatenate((_halves(scales), _join_nibbles(quants)), axis=1)


def _decode_q4_0(data: Array) -> Array:
    return _floats(data[:, :2]) * (_split_nibbles(data[:, 2:]).astype(np.float32) - 8)


def _encode_q4_1(blocks: Array) -> Array:
    scales, low, quants = _asymmetric(blocks, 15)
    return np.concatenate((_halves(scales), _halves(low), _join_nibbles(quants)), axis=1)


def _decode_q4_1(data: Array) -> Array:
    return _floats(data[:, :2]) * _split_nibbles(data[:, 4:]).astype(np.float32) + _floats(data[:, 2:4])


def _encode_q5_0(blocks: Array) -> Array:
    scales, quants = _symmetric(blocks, 16)
    return np.concatenate((_halves(scales), _fifth_bits(quants), _join_nibbles(quants)), axis=1)


def _decode_q5_0(data: Array) -> Array:
    quants = _with_fifth_bits(_split_nibbles(data[:, 6:]), data[:, 2:6])
    return _floats(data[:, :2]) * (quants.astype(np.float32) - 16)


def _encode_q5_1(blocks: Array) -> Array:
    scales, low, quants = _asymmetric(blocks, 31)
    return np.concatenate((_halves(scales), _halves(low), _fifth_bits(quants), _join_nibbles(quants)), axis=1)


def _decode_q5_1(data: Array) -> Array:
    quants = _with_fifth_bits(_split_nibbles(data[:, 8:]), data[:, 4:8])
    return _floats(data[:, :2]) * quants.astype(np.float32) + _floats(data[:, 2:4])


def _encode_k(blocks: Array, most: int) -> tuple[Array, Array]:
    """Scales and minimums of 8 groups, two factors of each kind: the bytes of these, and the numbers [blocks, 256]."""
    groups = blocks.reshape(len(blocks), 8, 32)
    lows = np.maximum(-groups.min(2), 0)
    scales = (groups.max(2) + lows) / most
    factors = np.stack((scales.max(1), lows.max(1)), axis=1) / 63
    whole = factors.astype(np.float16).astype(np.float32)
    small_scales = _rounded(scales * _inverse(whole[:, :1]), 63)
    small_lows = _rounded(lows * _inverse(whole[:, 1:]), 63)
    steps = (whole[:, :1] * small_scales)[:, :, None]
    quants = _rounded((groups + (whole[:, 1:] * small_lows)[:, :, None]) * _inverse(steps), most)
    packed = np.zeros((len(blocks), 12), np.uint8)
    packed[:, :4] = small_scales[:, :4] | small_scales[:, 4:] >> 4 << 6
    packed[:, 4:8] = small_lows[:, :4] | small_lows[:, 4:] >> 4 << 6
    packed[:, 8:] = (small_scales[:, 4:] & 15) | (small_lows[:, 4:] & 15) << 4
    return np.concatenate((_halves(factors), packed), axis=1), quants.reshape(len(blocks), 256)


def _decode_k(data: Array, quants: Array) -> Array:
    factors, packed = _floats(data[:, :4]), data[:, 4:16]
    scales = np.concatenate((packed[:, :4] & 63, (packed[:, 8:] & 15) | packed[:, :4] >> 6 << 4), axis=1)
    lows = np.concatenate((packed[:, 4:8] & 63, packed[:, 8:] >> 4 | packed[:, 4:8] >> 6 << 4), axis=1)
    steps = factors[:, :1] * scales.astype(np.float32)
    offsets = factors[:, 1:] * lows.astype(np.float32)
    out = steps[:, :, None] * quants.reshape(-1, 8, 32).astype(np.float32) - offsets[:, :, None]
    return out.reshape(len(data), 256)


def _join_k(quants: Array) -> Array:
    """Of each two groups of 32 numbers, the first is in the lower four bits."""
    pairs = quants.reshape(-1, 4, 2, 32)
    return ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4).reshape(len(quants), 128)


def _split_k(data: Array) -> Array:
    parts = data.reshape(-1, 4, 32)
    return np.stack((parts & 15, parts >> 4), axis=2).reshape(len(data), 256)


def _encode_q4_k(blocks: Array) -> Array:
    head, quants = _encode_k(blocks, 15)
    return np.concatenate((head, _join_k(quants)), axis=1)


def _decode_q4_k(data: Array) -> Array:
    return _decode_k(data, _split_k(data[:, 16:]))


def _encode_q5_k(blocks: Array) -> Array:
    """Byte j of the fifth bits has those of number j of each of the 8 groups."""
    head, quants = _encode_k(blocks, 31)
    upper = np.packbits(quants.reshape(-1, 8, 32) >> 4, axis=1, bitorder="little").reshape(len(blocks), 32)
    return np.concatenate((head, upper, _join_k(quants)), axis=1)


def _decode_q5_k(data: Array) -> Array:
    upper = np.unpackbits(data[:, 16:48].reshape(-1, 1, 32), axis=1, bitorder="little").reshape(len(data), 256)
    return _decode_k(data, _split_k(data[:, 48:]) | upper << 4)


def _encode_q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    scales = np.take_along_axis(groups, np.abs(groups).argmax(2)[:, :, None], 2)[:, :, 0] / -32
    factor = np.abs(scales).max(1, keepdims=True) / 127
    whole = factor.astype(np.float16).astype(np.float32)
    small = np.clip(np.round(scales * _inverse(whole)), -128, 127).astype(np.int8)
    steps = (whole * small)[:, :, None].astype(np.float32)
    quants = _rounded(groups * _inverse(steps) + 32, 63).reshape(-1, 2, 4, 32)
    lower = quants & 15
    joined = np.concatenate((lower[:, :, 0] | lower[:, :, 2] << 4, lower[:, :, 1] | lower[:, :, 3] << 4), axis=2)
    upper = quants >> 4
    bits = upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6
    parts = (joined.reshape(-1, 128), bits.reshape(-1, 64), small.view(np.uint8), _halves(factor))
    return np.concatenate(parts, axis=1)


def _decode_q6_k(data: Array) -> Array:
    lower, bits = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192].reshape(-1, 2, 32)
    quants = np.empty((len(data), 2, 4, 32), np.uint8)
    for part in range(4):
        quants[:, :, part] = (lower[:, :, part % 2] >> 4 * (part // 2) & 15) | (bits >> 2 * part & 3) << 4
    scales = np.ascontiguousarray(data[:, 192:208]).view(np.int8).astype(np.float32)
    steps = (_floats(data[:, 208:]) * scales)[:, :, None]
    return (steps * (quants.reshape(-1, 16, 16).astype(np.float32) - 32)).reshape(len(data), 256)


def _encode_mxfp4(blocks: Array) -> Array:
    largest = np.abs(blocks).max(1, keepdims=True)
    exponents = np.ceil(np.log2(np.maximum(largest, 1e-30) / 6)).astype(np.int64) + 127
    steps = np.ldexp(np.float32(1), exponents - 128)
    codes = np.abs(np.abs(blocks / steps)[:, :, None] - MXFP4_NUMBERS).argmin(2).astype(np.uint8)
    return np.concatenate(
        (exponents.astype(np.uint8), _join_nibbles(codes | (blocks < 0).astype(np.uint8) << 3)), axis=1
    )


def _decode_mxfp4(data: Array) -> Array:
    codes = _split_nibbles(data[:, 1:])
    steps = np.ldexp(np.float32(1), data[:, :1].astype(np.int64) - 128).astype(np.float32)
    return steps * np.where(codes & 8, -1, 1).astype(np.float32) * MXFP4_NUMBERS[codes & 7]


_ENCODERS: dict[str, Callable[[Array], Array]] = {
    "q8_0": _encode_q8_0,
    "q4_0": _encode_q4_0,
    "q4_1": _encode_q4_1,
    "q5_0": _encode_q5_0,
    "q5_1": _encode_q5_1,
    "q4_k": _encode_q4_k,
    "q5_k": _encode_q5_k,
    "q6_k": _encode_q6_k,
    "mxfp4": _encode_mxfp4,
}
_DECODERS: dict[str, Callable[[Array], Array]] = {
    "q8_0": _decode_q8_0,
    "q4_0": _decode_q4_0,
    "q4_1": _decode_q4_1,
    "q5_0": _decode_q5_0,
    "q5_1": _decode_q5_1,
    "q4_k": _decode_q4_k,
    "q5_k": _decode_q5_k,
    "q6_k": _decode_q6_k,
    "mxfp4": _decode_mxfp4,
}
