"""Triton kernels of attention: of the next token of each row, and of chunks of prompts.

Attention is computed for tiles of TILE tokens, each relative to its own maximum, and the tiles are merged in order: a
row's bits don't depend on the rows beside it, nor on how a text is cut into passes. Sums of weights and of squares are
exact in float64, so that their order doesn't matter.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from palaver.engines.torch.kernel_functions import LOG2E, launch_options, prefetch, tanh

TILE = 64
"""Tokens whose attention is computed relative to one maximum."""
JOINED_TILES, JOINED_COLUMNS = 24, 32
"""Tiles of attention that a program joins at once, and the part of a head that it computes: what it loads is then under
way together, since it has a register for each number."""
ALIGNMENT = tl.constexpr(16)
"""Bytes of which addresses in the cache are multiples. Triton doesn't know it of addresses that are read from memory,
and would load number by number."""
ROTATED_HEADS = 8
"""Heads of a row that a program rotates at once: a power of two."""
NO_KEY = tl.constexpr(-1e30)
FLUSH = tl.constexpr(2.0**-30)
"""Weights below this part of a tile's greatest one count as 0: sums of the others are exact in float64."""


@triton.jit
def _norm_and_rotate(a, b, gain_a, gain_b, cos, sin, epsilon, D: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
    """The two halves of heads, [heads, D / 2] each."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if NORM:
        wide_a = a.to(tl.float64)
        wide_b = b.to(tl.float64)
        mean = (tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)).to(tl.float32) / D
        scale = tl.rsqrt(mean + epsilon)[:, None]
        a = a * scale * gain_a.to(tl.float32)
        b = b * scale * gain_b.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _first_tile(position, window, WINDOW: tl.constexpr, T: tl.constexpr):
    """The tile with the first token that the one at this position sees."""
    if WINDOW:
        return tl.maximum(position - window + 1, 0) // T
    return 0


@triton.jit
def _seen(at, position, window, WINDOW: tl.constexpr):
    if WINDOW:
        return (at <= position) & (at > position - window)
    return at <= position


@triton.jit
def _tile_weights(x, seen, scale, softcap, SOFTCAP: tl.constexpr, dtype: tl.constexpr):
    """The maximum of a tile's scores, the weights relative to it, and their sum."""
    x = softcap * LOG2E * tanh(x * (scale / softcap)) if SOFTCAP else x * (scale * LOG2E)
    x = tl.where(seen, x, NO_KEY)
    top = tl.max(x, 1)
    weights = tl.exp2(x - top[:, None])
    weights = tl.where(seen & (weights >= FLUSH), weights, 0.0).to(dtype)
    return top, weights, tl.sum(weights.to(tl.float64), 1).to(tl.float32)


@triton.jit(do_not_specialize=["layer", "entries", "window"])
def _attend(
    qkv_ptr,
    base_ptr,
    member_ptr,
    head_ptr,
    position_ptr,
    rotary_ptr,
    cos_ptr,
    sin_ptr,
    query_gain_ptr,
    key_gain_ptr,
    partial_ptr,
    sums_ptr,
    layer,
    entries,
    scale,
    epsilon,
    window,
    softcap,
    H: tl.constexpr,
    KVH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one new token a row: program (row * KVH + head, j) computes its part of the tiles.

    A row's keys of layer 0 are at the address `base`; keys and values of the layers alternate, `member` elements apart;
    heads are `head` elements apart. Also norms and rotates the new key; the program with the last tile writes it, with
    its value, to the cache before it reads the tile. ROTATED: `_rotate_and_write` has done all that. `window`: with
    WINDOW, how many tokens a token sees, itself included.
    """
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    pid = tl.program_id(0)
    program = tl.program_id(1)
    row = pid // KVH
    kv_head = pid % KVH
    position = tl.load(position_ptr + row).to(tl.int32)
    base = tl.load(base_ptr + row)
    member = tl.load(member_ptr + row)
    head_stride = tl.load(head_ptr + row)
    rotary = tl.load(rotary_ptr + row).to(tl.int32)
    if PDL:
        gdc_launch_dependents()
    tiles = position // T + 1
    first = _first_tile(position, window, WINDOW, T)
    per = (tiles - first + PROGRAMS - 1) // PROGRAMS
    begin = first + program * per
    if begin >= tiles:
        return
    keys = tl.multiple_of(base.to(tl.pointer_type(dtype)) + 2 * layer * member + kv_head * head_stride, ALIGNMENT)
    values = tl.multiple_of(keys + member, ALIGNMENT)
    half = tl.arange(0, HALF)
    whole = tl.arange(0, D)
    group = tl.arange(0, GP)
    token = tl.arange(0, T)
    lines = begin * T * D + tl.arange(0, T * D // 64) * 64
    prefetch(keys + lines)
    prefetch(values + lines)
    cos = tl.load(cos_ptr + rotary * HALF + half)[None, :]
    sin = tl.load(sin_ptr + rotary * HALF + half)[None, :]
    query_gain_a = tl.load(query_gain_ptr + half)[None, :]
    query_gain_b = tl.load(query_gain_ptr + HALF + half)[None, :]
    key_gain_a = tl.load(key_gain_ptr + half)[None, :]
    key_gain_b = tl.load(key_gain_ptr + HALF + half)[None, :]
    if PDL:
        gdc_wait()
    mine = qkv_ptr + row.to(tl.int64) * (H + 2 * KVH) * D
    query = mine + (kv_head * G + group)[:, None] * D + half[None, :]
    in_group = (group < G)[:, None]
    a = tl.load(query, mask=in_group, other=0.0)
    b = tl.load(query + HALF, mask=in_group, other=0.0)
    if not ROTATED:
        a, b = _norm_and_rotate(a, b, query_gain_a, query_gain_b, cos, sin, epsilon, D, NORM, dtype)
        new = mine + (H + kv_head) * D + half[None, :]
        new_a = tl.load(new)
        new_b = tl.load(new + HALF)
        new_a, new_b = _norm_and_rotate(new_a, new_b, key_gain_a, key_gain_b, cos, sin, epsilon, D, NORM, dtype)
        new_value = tl.load(mine + (H + KVH + kv_head) * D + whole[None, :])
        if begin + per >= tiles:
            here = position.to(tl.int64) * D
            tl.store(keys + here + half[None, :], new_a)
            tl.store(keys + here + HALF + half[None, :], new_b)
            tl.store(values + here + whole[None, :], new_value)
            tl.debug_barrier()  # this program reads them in its last tile
    for tile in tl.range(begin, tl.minimum(begin + per, tiles), num_stages=STAGES):
        at = tile * T + token
        known = (at <= position)[:, None]
        here = at[:, None] * D
        k_a = tl.load(keys + here + half[None, :], mask=known, other=0.0)
        k_b = tl.load(keys + here + HALF + half[None, :], mask=known, other=0.0)
        v = tl.load(values + here + whole[None, :], mask=known, other=0.0)
        x = tl.dot(a, tl.trans(k_a), input_precision="ieee")
        x = tl.dot(b, tl.trans(k_b), x, input_precision="ieee")
        seen = _seen(at, position, window, WINDOW)[None, :]
        top, weights, total = _tile_weights(x, seen, scale, softcap, SOFTCAP, dtype)
        out = tl.dot(weights, v, input_precision="ieee")
        entry = ((pid * entries + tile) * GP + group).to(tl.int64)
        tl.store(partial_ptr + entry[:, None] * D + whole[None, :], out, mask=in_group)
        tl.store(sums_ptr + entry * 2, top, mask=group < G)
        tl.store(sums_ptr + entry * 2 + 1, total, mask=group < G)


@triton.jit
def _with_sink(top, total, sink):
    """The sum of the weights with a sink among them, and the factor of what was summed so far."""
    new_top = tl.maximum(top, sink)
    scale = tl.exp2(top - new_top)
    return total * scale + tl.exp2(sink - new_top), scale


@triton.jit(do_not_specialize=["entries", "window"])
def _join(
    partial_ptr,
    sums_ptr,
    position_ptr,
    sinks_ptr,
    out_ptr,
    entries,
    window,
    H: tl.constexpr,
    KVH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the tiles of one row and head in order, AT_ONCE loaded at a time: program (row * H + head, j) the j-th
    COLUMNS of their results. SINKS: a score of the head that takes a share of the weights."""
    pid = tl.program_id(0)
    row = pid // H
    head = pid % H
    position = tl.load(position_ptr + row).to(tl.int32)
    first_tile = _first_tile(position, window, WINDOW, T)
    tiles = position // T + 1 - first_tile
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = (((row * KVH + head // G) * entries + first_tile) * GP + head % G).to(tl.int64)
    top = tl.full([], NO_KEY, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([COLUMNS], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in range(0, tiles, AT_ONCE):
        tops = ()
        totals = ()
        outs = ()
        for i in tl.static_range(AT_ONCE):
            entry = first + (start + i) * GP
            there = start + i < tiles  # what isn't there changes no bit
            tops = tops + (tl.load(sums_ptr + entry * 2, mask=there, other=NO_KEY),)
            totals = totals + (tl.load(sums_ptr + entry * 2 + 1, mask=there, other=0.0),)
            outs = outs + (tl.load(partial_ptr + entry * D + columns, mask=there, other=0.0),)
        for i in tl.static_range(AT_ONCE):
            new_top = tl.maximum(top, tops[i])
            old = tl.exp2(top - new_top)
            new = tl.exp2(tops[i] - new_top)
            total = total * old + totals[i] * new
            out = out * old + outs[i] * new
            top = new_top
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total, scale = _with_sink(top, total, sink)
        out *= scale
    tl.store(out_ptr + pid.to(tl.int64) * D + columns, (out / total).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_write(
    qkv_ptr,
    base_ptr,
    member_ptr,
    head_ptr,
    position_ptr,
    rotary_ptr,
    cos_ptr,
    sin_ptr,
    query_gain_ptr,
    key_gain_ptr,
    layer,
    epsilon,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norms and rotates the queries of a prefill in place, and writes its keys and values to the cache. Program
    (row, j) takes the j-th HEADS heads, which are all of one kind."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    row = tl.program_id(0)
    first = tl.program_id(1) * HEADS
    head = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    mine = qkv_ptr + (row.to(tl.int64) * (H + 2 * KVH) + first) * D + head * D + half
    a = tl.load(mine)
    b = tl.load(mine + HALF)
    if first < H + KVH:
        rotary = tl.load(rotary_ptr + row).to(tl.int32)
        gain_ptr = tl.where(first < H, query_gain_ptr, key_gain_ptr)
        gain_a = tl.load(gain_ptr + half)
        gain_b = tl.load(gain_ptr + HALF + half)
        cos = tl.load(cos_ptr + rotary * HALF + half)
        sin = tl.load(sin_ptr + rotary * HALF + half)
        a, b = _norm_and_rotate(a, b, gain_a, gain_b, cos, sin, epsilon, D, NORM, dtype)
    if first < H:
        tl.store(mine, a)
        tl.store(mine + HALF, b)
    else:
        is_value = (first >= H + KVH).to(tl.int64)
        kv_head = first - H - is_value * KVH + head
        stride = tl.multiple_of(tl.load(head_ptr + row), ALIGNMENT)
        cache = tl.load(base_ptr + row).to(tl.pointer_type(dtype))
        cache += (2 * layer + is_value) * tl.load(member_ptr + row) + tl.load(position_ptr + row) * D
        cache = tl.multiple_of(cache, ALIGNMENT) + kv_head * stride + half
        tl.store(cache, a)
        tl.store(cache + HALF, b)


@triton.jit(do_not_specialize=["layer", "window"])
def _attend_prefill(
    qkv_ptr,
    sinks_ptr,
    out_ptr,
    base_ptr,
    member_ptr,
    head_ptr,
    position_ptr,
    block_ptr,
    queries_ptr,
    layer,
    scale,
    window,
    softcap,
    H: tl.constexpr,
    KVH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of new tokens of prompts: tile by tile as in `_attend`, merged as in `_join`.

    Program (i, head) computes block i: up to QUERIES tokens of one sequence, in rows that follow each other."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    kv_head = tl.program_id(1)
    count = tl.load(queries_ptr + tl.program_id(0)).to(tl.int32)
    if count == 0:
        return
    first = tl.load(block_ptr + tl.program_id(0))
    start = tl.load(position_ptr + first).to(tl.int32)
    member = tl.load(member_ptr + first)
    keys = tl.load(base_ptr + first).to(tl.pointer_type(dtype))
    keys = tl.multiple_of(keys + 2 * layer * member + kv_head * tl.load(head_ptr + first), ALIGNMENT)
    values = tl.multiple_of(keys + member, ALIGNMENT)
    half = tl.arange(0, HALF)
    whole = tl.arange(0, D)
    token = tl.arange(0, T)
    rows = tl.arange(0, QUERIES * GP)
    query = rows // GP
    head = kv_head * G + rows % GP
    valid = (query < count) & (rows % GP < G)
    position = start + query
    row = first + query
    mine = qkv_ptr + (row * (H + 2 * KVH) + head)[:, None] * D + half[None, :]
    a = tl.load(mine, mask=valid[:, None], other=0.0)
    b = tl.load(mine + HALF, mask=valid[:, None], other=0.0)
    top = tl.full([QUERIES * GP], NO_KEY, tl.float32)
    total = tl.zeros([QUERIES * GP], tl.float32)
    out = tl.zeros([QUERIES * GP, D], tl.float32)
    tiles = (start + count - 1) // T + 1
    first_tile = _first_tile(start, window, WINDOW, T)
    for tile in tl.range(first_tile, tiles, num_stages=STAGES):
        at = tile * T + token
        known = (at < start + count)[:, None]
        here = at[:, None] * D
        k_a = tl.load(keys + here + half[None, :], mask=known, other=0.0)
        k_b = tl.load(keys + here + HALF + half[None, :], mask=known, other=0.0)
        v = tl.load(values + here + whole[None, :], mask=known, other=0.0)
        x = tl.dot(a, tl.trans(k_a), input_precision="ieee")
        x = tl.dot(b, tl.trans(k_b), x, input_precision="ieee")
        seen = _seen(at[None, :], position[:, None], window, WINDOW)
        tile_top, weights, tile_total = _tile_weights(x, seen, scale, softcap, SOFTCAP, dtype)
        tile_out = tl.dot(weights, v, input_precision="ieee")
        new_top = tl.maximum(top, tile_top)
        old = tl.exp2(top - new_top)
        new = tl.exp2(tile_top - new_top)
        total = total * old + tile_total * new
        out = out * old[:, None] + tile_out * new[:, None]
        top = new_top
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total, factor = _with_sink(top, total, sink)
        out *= factor[:, None]
    place = out_ptr + (row * H + head)[:, None] * D + whole[None, :]
    tl.store(place, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])


def join_tiles(
    tiles: Tensor,
    sums: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    rows: int,
    entries: int,
    window: int | None,
    sizes: Mapping[str, int],
    pdl: bool,
) -> None:
    """What `_attend` left of the first rows becomes their results. `entries`: tiles of a row and KV head that there is
    room for. `window`: None if a token sees all before it. `sizes`: of heads, as the kernels name them."""
    columns = min(sizes["D"], JOINED_COLUMNS)
    _join[(rows * sizes["H"], sizes["D"] // columns)](
        tiles,
        sums,
        positions,
        out if sinks is None else sinks,
        out,
        entries,
        window or 0,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        AT_ONCE=JOINED_TILES,
        COLUMNS=columns,
        **sizes,
        **launch_options(pdl, num_warps=1),
    )


def rotate_and_write(
    qkv: Tensor,
    addresses: Sequence[Tensor],
    positions: Tensor,
    rotary: tuple[Tensor, Tensor, Tensor],
    gains: tuple[Tensor, Tensor],
    layer: int,
    epsilon: float,
    sizes: Mapping[str, int],
    norm: bool,
) -> None:
    """Norms and rotates queries in place, and writes keys and values to the cache. `addresses`: of each row's keys in
    layer 0, and the distances between layers and heads there. `rotary`: positions, cosines and sines. `gains`: of the
    norms of queries and keys. `sizes`: of heads, as the kernels name them."""
    heads, kv_heads = sizes["H"], sizes["KVH"]
    at_once = min(math.gcd(heads, kv_heads) & -math.gcd(heads, kv_heads), ROTATED_HEADS)
    _rotate_and_write[(len(qkv), (heads + 2 * kv_heads) // at_once)](
        qkv,
        *addresses,
        positions,
        *rotary,
        *gains,
        layer,
        epsilon,
        H=heads,
        KVH=kv_heads,
        D=sizes["D"],
        HEADS=at_once,
        NORM=norm,
        num_warps=max(1, at_once // 2),
        enable_fp_fusion=False,
    )
