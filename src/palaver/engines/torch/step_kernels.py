"""Triton kernels of the passes of a plain decoder on CUDA, for weights stored as [out, in].

A row's bits don't depend on the rows beside it, nor on how a text is cut into passes: each sum has one order, whatever
the shape of the tiles that compute it. Three rules achieve that:

- A product sums over K in steps of the tensor cores' depth, in `split` parts that are joined in order.
- Attention is computed for tiles of TILE tokens, each relative to its own maximum, and the tiles are merged in order.
- All other sums are of bfloat16 numbers in float64, where they are exact, so that their order doesn't matter: squares
  for norms, and the weights of a tile after rounding.

`matvec` is the exception: quicker for a single row, with sums in an order of its own.

PDL (programmatic dependent launch): a kernel starts while the one before it ends. What doesn't depend on that one, such
as weights, is fetched before `gdc_wait`, everything else after it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: RUF005 (Triton knows no unpacking)

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE = 64
"""Tokens whose attention is computed relative to one maximum."""
JOINED_TILES, JOINED_COLUMNS = 24, 32
"""Tiles of attention that a program joins at once, and the part of a head that it computes: what it loads is then under
way together, since it has a register for each number."""
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(os.environ.get("TRITON_INTERPRET")))
"""Triton's interpreter has no assembly."""
ALIGNMENT = tl.constexpr(16)
"""Bytes of which addresses in the cache are multiples. Triton doesn't know it of addresses that are read from memory,
and would load number by number."""
NO_KEY = tl.constexpr(-1e30)
UNROLLED = tl.constexpr(4)
"""Parts of a sum up to which a program's loop over them is unrolled. 15 took two minutes to compile."""
SWIGLU_ALPHA = tl.constexpr(1.702)
SWIGLU_LIMIT = tl.constexpr(7.0)
FLUSH = tl.constexpr(2.0**-30)
"""Weights below this part of a tile's greatest one count as 0: sums of the others are exact in float64."""


@triton.jit
def _prefetch(pointers):
    """Asks the L2 cache for these addresses."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _rounded(x):
    """The same numbers. The compiler would start the sum of a single product of tiles with what is added to it later,
    which rounds differently."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _mix(x):
    """The finaliser of splitmix64, as in `core/rng.py`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _embed(
    id_ptr,
    position_ptr,
    state_ptr,
    start_ptr,
    settings_ptr,
    embedding_ptr,
    gain_ptr,
    hidden_ptr,
    scaled_ptr,
    squares_ptr,
    scale,
    K: tl.constexpr,
    BK: tl.constexpr,
    NT: tl.constexpr,
    NTP: tl.constexpr,
    SETTINGS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """The scaled embedding of each row's token, the same times the first norm's gain, and its sum of squares. SAMPLES:
    also the row's random number, by its position in the reply."""
    row = tl.program_id(0)
    k = tl.arange(0, BK)
    inside = k < K
    token = tl.load(id_ptr + row)
    x = tl.load(embedding_ptr + token * K + k, mask=inside, other=0.0)
    x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(hidden_ptr + row.to(tl.int64) * K + k, x, mask=inside)
    wide = x.to(tl.float32)
    gain = tl.load(gain_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row.to(tl.int64) * K + k, (wide * gain).to(scaled_ptr.dtype.element_ty), mask=inside)
    part = tl.arange(0, NTP)
    total = tl.sum(wide.to(tl.float64) * wide.to(tl.float64), 0)
    tl.store(squares_ptr + row * NT + part, tl.where(part == 0, total, 0.0), mask=part < NT)
    if SAMPLES:
        position = tl.load(position_ptr + row) + 1 - tl.load(start_ptr + row)
        state = tl.load(state_ptr + row).to(tl.uint64, bitcast=True)
        offset = tl.full([], 0x3C6EF372FE94F82A, tl.uint64)  # twice the golden ratio of `_mix`
        mixed = _mix(state ^ _mix(position.to(tl.uint64) + offset))
        tl.store(settings_ptr + row * SETTINGS + 4, (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16)


@triton.jit
def _advance(
    results_ptr,
    host_ptr,
    sampled_ptr,
    id_ptr,
    position_ptr,
    rotary_ptr,
    live_ptr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Moves each row on to the token that was sampled for it, and copies its results to the host. Rows of padding stay
    where they are."""
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    found = tl.load(results_ptr + row * WIDTH + column, mask=inside)
    tl.store(host_ptr + row * WIDTH + column, found, mask=inside)
    live = tl.load(live_ptr + row)
    token = tl.load(results_ptr + row * WIDTH).to(tl.int64)
    tl.store(sampled_ptr + row, token)
    tl.store(id_ptr + row, token * live)
    tl.store(position_ptr + row, tl.load(position_ptr + row) + live)
    tl.store(rotary_ptr + row, tl.load(rotary_ptr + row) + live)


@triton.jit
def _replace_tokens(results_ptr, sampled_ptr, id_ptr, live_ptr, WIDTH: tl.constexpr):
    """As `_advance`, for rows that have moved on already."""
    row = tl.program_id(0)
    token = tl.load(results_ptr + row * WIDTH).to(tl.int64)
    tl.store(sampled_ptr + row, token)
    tl.store(id_ptr + row, token * tl.load(live_ptr + row))


@triton.jit(do_not_specialize=["size", "table_size", "rows"])
def _load_rows(
    new_ptr,
    sampled_ptr,
    table_ptr,
    settings_ptr,
    size,
    table_size,
    rows,
    FIELDS: tl.constexpr,
    SETTINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replaces the first `size` rows of the table, and the settings of `rows` of them, by new ones.

    A row's first field is its token, unless its source, the line after the fields, is a row of the last step: then it
    is the token that was sampled there. The lines of the settings come last.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < size
    source = tl.load(new_ptr + FIELDS * size + row, mask=inside, other=-1)
    for field in tl.static_range(FIELDS):
        value = tl.load(new_ptr + field * size + row, mask=inside, other=0)
        if field == 0:
            value = tl.where(source >= 0, tl.load(sampled_ptr + source, mask=inside & (source >= 0), other=0), value)
        tl.store(table_ptr + field * table_size + row, value, mask=inside)
    for setting in tl.static_range(SETTINGS):
        bits = tl.load(new_ptr + (FIELDS + 1 + setting) * size + row, mask=row < rows, other=0)
        tl.store(settings_ptr + row * SETTINGS + setting, bits.to(tl.float64, bitcast=True), mask=row < rows)


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
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


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
    x = softcap * LOG2E * _tanh(x * (scale / softcap)) if SOFTCAP else x * (scale * LOG2E)
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
    _prefetch(keys + lines)
    _prefetch(values + lines)
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
    NORM: tl.constexpr,
):
    """Norms and rotates the queries of a prefill in place, and writes its keys and values to the cache. One program for
    each row and head."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    row = tl.program_id(0)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)[None, :]
    mine = qkv_ptr + (row.to(tl.int64) * (H + 2 * KVH) + head) * D
    a = tl.load(mine + half)
    b = tl.load(mine + HALF + half)
    if head < H + KVH:
        rotary = tl.load(rotary_ptr + row).to(tl.int32)
        gain_ptr = tl.where(head < H, query_gain_ptr, key_gain_ptr)
        gain_a = tl.load(gain_ptr + half)
        gain_b = tl.load(gain_ptr + HALF + half)
        cos = tl.load(cos_ptr + rotary * HALF + half)
        sin = tl.load(sin_ptr + rotary * HALF + half)
        a, b = _norm_and_rotate(a, b, gain_a, gain_b, cos, sin, epsilon, D, NORM, dtype)
    if head < H:
        tl.store(mine + half, a)
        tl.store(mine + HALF + half, b)
    else:
        is_value = (head >= H + KVH).to(tl.int64)
        kv_head = head - H - is_value * KVH
        cache = tl.load(base_ptr + row).to(tl.pointer_type(dtype))
        cache += (2 * layer + is_value) * tl.load(member_ptr + row) + kv_head * tl.load(head_ptr + row)
        cache = tl.multiple_of(cache + tl.load(position_ptr + row) * D, ALIGNMENT)
        tl.store(cache + half, a)
        tl.store(cache + HALF + half, b)


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


@triton.jit
def _softcap(x, SOFTCAP: tl.constexpr):
    """SOFTCAP 0: none."""
    if SOFTCAP > 0:
        x = SOFTCAP * _tanh(x / SOFTCAP)
    return x


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        gate = tl.minimum(gate, SWIGLU_LIMIT)
        up = tl.minimum(tl.maximum(up, -SWIGLU_LIMIT), SWIGLU_LIMIT) + 1
        gate = gate * tl.sigmoid(SWIGLU_ALPHA * gate)
    return gate * up


@triton.jit
def _read_int4(words, bias, PLACE: tl.constexpr):
    """The 4-bit integers at one place of words, plus `bias` and 128: they become the last bits of 128."""
    if INTERPRETED:
        result = ((words >> (4 * PLACE)) & 15).to(tl.float32) + (bias + 128)
    else:
        result = tl.inline_asm_elementwise(
            """{
                .reg .b32 pair, one;
                mov.b32 one, 0x3F803F80;
                prmt.b32 pair, $1, $2, $3;
                shr.u32 pair, pair, $5;
                lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
                fma.rn.bf16x2 $0, pair, one, $7;
            }""",
            "=r,r,r,r,r,r,r,r",
            [words, 0x5410 if PLACE < 4 else 0x7632, 4 * (PLACE % 4), bias],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def _read_float8(words, PLACE: tl.constexpr):
    """The 8-bit floats at one place of words."""
    if INTERPRETED:
        top = words << (24 - 8 * PLACE)
        bits = (top & -2147483648) | ((top >> 4) & 0x07F00000)
        result = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the exponent has another bias
    else:
        result = tl.inline_asm_elementwise(
            """{
                .reg .b32 pair, halves;
                .reg .b16 low, high, first, second;
                .reg .f32 a, b;
                prmt.b32 pair, $1, $2, $3;
                mov.b32 {low, high}, pair;
                cvt.rn.f16x2.e4m3x2 halves, low;
                mov.b32 {first, second}, halves;
                cvt.f32.f16 a, first;
                cvt.f32.f16 b, second;
                cvt.rn.bf16x2.f32 $0, b, a;
            }""",
            "=r,r,r,r,r",
            [words, (4 + PLACE) * 16 + PLACE],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def _read_int8(words, PLACE: tl.constexpr):
    """The 8-bit integers at one place of words, less 128: they become the last bits of 2^23."""
    bits = ((words >> (8 * PLACE)) & 255) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _read_place(words, bias, KIND: tl.constexpr, PLACE: tl.constexpr, dtype: tl.constexpr):
    if KIND == "int4":
        result = _read_int4(words, bias, PLACE)
    elif KIND == "float8":
        result = _read_float8(words, PLACE)
    else:
        result = _read_int8(words, PLACE)
    return result.to(dtype)


@triton.jit
def _zero_points(zeros, WORDS: tl.constexpr, ZEROS: tl.constexpr, BN: tl.constexpr):
    """What is added to 4-bit integers and 128: less 8 where no zero points are stored."""
    dtype: tl.constexpr = tl.float32 if INTERPRETED else tl.bfloat16
    if ZEROS:
        bias = tl.broadcast_to((-128.0 - tl.load(zeros).to(tl.float32)).to(dtype)[:, None], [BN, WORDS])
    else:
        bias = tl.full([BN, WORDS], -136.0, dtype)
    return bias


@triton.jit
def _add_packed(
    a,
    b,
    weights,
    up,
    scales,
    zeros,
    inputs,
    valid,
    at,
    N: tl.constexpr,
    OUT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    GLU: tl.constexpr,
):
    """Adds the products of a block of packed weights, whose first input is `at`, to a; with GLU, those of the block
    `up` to b. The sums of a group's products are multiplied by its scale; GROUP = 0: that is left to the caller."""
    PLACES: tl.constexpr = 8 if KIND == "int4" else 4
    WORDS: tl.constexpr = BK // PLACES
    PER: tl.constexpr = GROUP if GROUP > 0 else 1 << 30
    words = tl.load(weights)
    up_words = tl.load(up) if GLU else words
    line = at // PER * OUT
    bias = _zero_points(zeros + line, WORDS, ZEROS, BN)
    up_bias = _zero_points(zeros + line + N, WORDS, ZEROS, BN) if GLU else bias
    part_a = tl.zeros_like(a)
    part_b = tl.zeros_like(a)
    for place in tl.static_range(PLACES):
        x = tl.load(inputs + place * WORDS, mask=valid[None, :], other=0.0)
        if ZEROS and GROUP > 0 and place > 0 and place * WORDS % GROUP == 0:
            line = (at + place * WORDS) // PER * OUT
            bias = _zero_points(zeros + line, WORDS, ZEROS, BN)
            up_bias = _zero_points(zeros + line + N, WORDS, ZEROS, BN) if GLU else bias
        w = _read_place(words, bias, KIND, place, x.dtype)
        if GROUP > 0:
            part_a = tl.dot(w, x, part_a, input_precision="ieee")
        else:
            a = tl.dot(w, x, a, input_precision="ieee")
        if GLU:
            u = _read_place(up_words, up_bias, KIND, place, x.dtype)
            if GROUP > 0:
                part_b = tl.dot(u, x, part_b, input_precision="ieee")
            else:
                b = tl.dot(u, x, b, input_precision="ieee")
        if GROUP > 0 and (place == PLACES - 1 or (place + 1) * WORDS % GROUP == 0):
            scale = scales + (at + place * WORDS) // PER * OUT
            a += part_a * tl.load(scale)[:, None]
            part_a = tl.zeros_like(a)
            if GLU:
                b += part_b * tl.load(scale + N)[:, None]
                part_b = tl.zeros_like(a)
    return a, b


@triton.jit
def _unpack(
    weight_ptr,
    zero_ptr,
    out_ptr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Writes the numbers of packed weights as floats, [OUT, K]: those that `_add_packed` multiplies, before their
    scales. One program for each block."""
    PLACES: tl.constexpr = 8 if KIND == "int4" else 4
    WORDS: tl.constexpr = BK // PLACES
    PER: tl.constexpr = GROUP if GROUP > 0 else 1 << 30
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    block = tl.program_id(0)
    line = tl.arange(0, 64)
    word = tl.arange(0, WORDS)
    n = block // (K // BK) * 64 + line
    at = block % (K // BK) * BK
    words = tl.load(weight_ptr + block.to(tl.int64) * 64 * WORDS + line[:, None] * WORDS + word[None, :])
    bias = _zero_points(zero_ptr + at // PER * OUT + n, WORDS, ZEROS, 64)
    out = out_ptr + n[:, None].to(tl.int64) * K + at + word[None, :]
    for place in tl.static_range(PLACES):
        if ZEROS and GROUP > 0 and place > 0 and place * WORDS % GROUP == 0:
            bias = _zero_points(zero_ptr + (at + place * WORDS) // PER * OUT + n, WORDS, ZEROS, 64)
        tl.store(out + place * WORDS, _read_place(words, bias, KIND, place, dtype))


@triton.jit
def _add_unpacked(
    a,
    b,
    weights,
    up,
    scales,
    inputs,
    valid,
    at,
    N: tl.constexpr,
    OUT: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PERIOD: tl.constexpr,
    GLU: tl.constexpr,
):
    """The same as `_add_packed`, to the bit, of numbers that `_unpack` has written. PERIOD: after how many inputs sums
    are multiplied by a scale."""
    PIECE: tl.constexpr = min(BK, PERIOD)
    STEP: tl.constexpr = max(BK, PERIOD)
    part_a = tl.zeros_like(a)
    part_b = tl.zeros_like(a)
    for piece in tl.static_range(STEP // PIECE):
        x = tl.load(inputs + piece * PIECE, mask=valid[None, :], other=0.0)
        part_a = tl.dot(tl.load(weights + piece * PIECE), x, part_a, input_precision="ieee")
        if GLU:
            part_b = tl.dot(tl.load(up + piece * PIECE), x, part_b, input_precision="ieee")
        if (piece + 1) * PIECE % PERIOD == 0:
            scale = scales + (at + piece * PIECE) // GROUP * OUT
            a += part_a * tl.load(scale)[:, None]
            part_a = tl.zeros_like(a)
            if GLU:
                b += part_b * tl.load(scale + N)[:, None]
                part_b = tl.zeros_like(a)
    return a, b


@triton.jit
def _sum_part(
    weights,
    scales,
    zeros,
    inputs,
    valid,
    like,
    first,
    N: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    PERIOD: tl.constexpr,
):
    """The sum of a part's products. `first`: its first input. WIDTH: from one tile of weights to the next."""
    STEP: tl.constexpr = max(BK, PERIOD)
    summed = tl.zeros_like(like)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        at = first + i * STEP
        if PERIOD > 0:
            summed, _ = _add_unpacked(
                summed, summed, weights, weights, scales, inputs, valid, at, N, N, BK, GROUP, PERIOD, False
            )
        elif KIND == "" or KIND == "unpacked":
            x = tl.load(inputs, mask=valid[None, :], other=0.0)
            summed = tl.dot(tl.load(weights), x, summed, input_precision="ieee")
        else:
            summed, _ = _add_packed(
                summed,
                summed,
                weights,
                weights,
                scales,
                zeros,
                inputs,
                valid,
                at,
                N,
                N,
                BN,
                BK,
                KIND,
                GROUP,
                ZEROS,
                False,
            )
        weights += WIDTH
        inputs += STEP
    return _rounded(summed) if STEPS == 1 else summed


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    squares_ptr,
    gain_ptr,
    out_ptr,
    scaled_ptr,
    out_squares_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PARALLEL: tl.constexpr,
    STAGES: tl.constexpr,
    NT: tl.constexpr,
    NTP: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    PERIOD: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    DISTANCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[m, n] = sum_k weight[n, k] * x[m, k] on the tensor cores, with the weights as the wide operand.

    K is summed in SPLIT parts, which are added in order: by the last of SPLIT programs to finish (PARALLEL), or by one
    program. DISTANCE: for how many tiles ahead the L2 is asked for weights. EARLY: the next kernel may start at once,
    not only near the end.
    NT > 0: x lacks a norm, and the result is scaled by it, from NT partial sums of squares. GLU: the weights are those
    of gate and up, and the result is that of ACTIVATION. RESIDUAL: adds to `out`; also writes the sum times the next
    norm's gain, and its sums of squares.
    KIND: of packed weights (`quantized_weights.py`); "": floats. GROUP: how many inputs share a scale; 0: all. BN is
    then 64, and BK the inputs of a block: the order of sums depends on it. "unpacked": the numbers of such weights as
    floats, whose sums are multiplied by scales after PERIOD inputs; 0: after all.
    """
    pid = tl.program_id(0)
    row_tiles = (rows + BM - 1) // BM
    row_tile = pid % row_tiles
    rest = pid // row_tiles
    PARTS: tl.constexpr = SPLIT if PARALLEL else 1
    tile = rest // PARTS
    part = rest % PARTS
    KS: tl.constexpr = K // SPLIT
    n = tile * BN + tl.arange(0, BN)
    m = row_tile * BM + tl.arange(0, BM)
    valid = m < rows
    OUT: tl.constexpr = 2 * N if GLU else N
    FLOATS: tl.constexpr = KIND == "" or KIND == "unpacked"
    PLACES: tl.constexpr = 1 if FLOATS else 8 if KIND == "int4" else 4
    STEP: tl.constexpr = max(BK, PERIOD)
    WORDS: tl.constexpr = min(BK, PERIOD) if PERIOD > 0 else BK // PLACES
    UP: tl.constexpr = N * K // PLACES
    WIDTH: tl.constexpr = STEP if FLOATS else 64 * WORDS
    k = part * KS + tl.arange(0, WORDS)
    if FLOATS:
        weights = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    else:
        within = tl.arange(0, BN)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        weights = weight_ptr + (tile * (K // BK) + part * (KS // BK)) * WIDTH + within
    inputs = x_ptr + m[None, :].to(tl.int64) * K + k[:, None]
    scales = scale_ptr + n
    zeros = zero_ptr + n
    LINES: tl.constexpr = max(BK // 64, 1)
    line = part * KS + tl.arange(0, LINES) * 64
    ahead = weight_ptr + n[:, None].to(tl.int64) * K + line[None, :]
    STEPS: tl.constexpr = KS // STEP
    if PDL and EARLY:
        gdc_launch_dependents()
    if DISTANCE > 0:
        for i in tl.static_range(min(DISTANCE, STEPS)):
            _prefetch(ahead + i * BK)
            if GLU:
                _prefetch(ahead + N * K + i * BK)
    if PDL:
        gdc_wait()
    a = tl.zeros([BN, BM], tl.float32)
    b = tl.zeros([BN, BM], tl.float32)
    if PARALLEL or SPLIT == 1:
        for i in tl.range(0, STEPS, num_stages=STAGES):
            if DISTANCE > 1 and DISTANCE < STEPS:
                far = tl.minimum(i + DISTANCE, STEPS - 1) * BK
                _prefetch(ahead + far)
                if GLU:
                    _prefetch(ahead + N * K + far)
            at = part * KS + i * STEP
            if PERIOD > 0:
                a, b = _add_unpacked(
                    a, b, weights, weights + UP, scales, inputs, valid, at, N, OUT, BK, GROUP, PERIOD, GLU
                )
            elif FLOATS:
                x = tl.load(inputs, mask=valid[None, :], other=0.0)
                a = tl.dot(tl.load(weights), x, a, input_precision="ieee")
                if GLU:
                    b = tl.dot(tl.load(weights + UP), x, b, input_precision="ieee")
            else:
                a, b = _add_packed(
                    a,
                    b,
                    weights,
                    weights + UP,
                    scales,
                    zeros,
                    inputs,
                    valid,
                    at,
                    N,
                    OUT,
                    BN,
                    BK,
                    KIND,
                    GROUP,
                    ZEROS,
                    GLU,
                )
            weights += WIDTH
            inputs += STEP
            if PDL and not EARLY:  # noqa: SIM102 (known when the kernel is compiled)
                if i == max(STEPS - max(DISTANCE, 2), 0):
                    gdc_launch_dependents()
    elif SPLIT <= UNROLLED and FLOATS and PERIOD == 0:
        for j in tl.static_range(SPLIT):
            a += _sum_part(
                weights,
                scales,
                zeros,
                inputs,
                valid,
                a,
                j * KS,
                N,
                BN,
                BK,
                STEPS,
                STAGES,
                WIDTH,
                KIND,
                GROUP,
                ZEROS,
                PERIOD,
            )
            weights += STEPS * WIDTH
            inputs += KS
    else:
        for j in tl.range(0, SPLIT):
            a += _sum_part(
                weights,
                scales,
                zeros,
                inputs,
                valid,
                a,
                j * KS,
                N,
                BN,
                BK,
                STEPS,
                STAGES,
                WIDTH,
                KIND,
                GROUP,
                ZEROS,
                PERIOD,
            )
            weights += STEPS * WIDTH
            inputs += KS
    if STEPS == 1:
        a = _rounded(a)
        b = _rounded(b)
    if PARTS > 1:
        place = (pid * BN + tl.arange(0, BN))[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(partial_ptr + place, a, mask=valid[None, :])
        tl.debug_barrier()
        done = tl.atomic_add(counter_ptr + tile * row_tiles + row_tile, 1, sem="acq_rel")
        if done != PARTS - 1:
            return
        tl.store(counter_ptr + tile * row_tiles + row_tile, 0)
        place -= part * row_tiles * BN * BM
        a = tl.zeros([BN, BM], tl.float32)
        for i in tl.static_range(PARTS):
            step = i * row_tiles * BN * BM
            a += tl.load(partial_ptr + place + step, mask=valid[None, :], other=0.0, cache_modifier=".cg")
    if KIND != "" and GROUP == 0:
        a *= tl.load(scales)[:, None]
        if GLU:
            b *= tl.load(scales + N)[:, None]
    if NT > 0:
        index = tl.arange(0, NTP)
        squares = squares_ptr + m[:, None] * NT + index[None, :]
        inside = valid[:, None] & (index < NT)[None, :]
        mean = tl.sum(tl.load(squares, mask=inside, other=0.0), 1).to(tl.float32) / K
        norm = tl.rsqrt(mean + epsilon)
        a *= norm[None, :]
        if GLU:
            b *= norm[None, :]
    if BIAS:
        a += tl.load(bias_ptr + n).to(tl.float32)[:, None]
        if GLU:
            b += tl.load(bias_ptr + N + n).to(tl.float32)[:, None]
    if GLU:
        a = _activate(a, b, ACTIVATION)
    a = _softcap(a, SOFTCAP)
    place = m[None, :].to(tl.int64) * N + n[:, None]
    if RESIDUAL:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        total = (a + tl.load(out_ptr + place, mask=valid[None, :], other=0.0).to(tl.float32)).to(dtype)
        tl.store(out_ptr + place, total, mask=valid[None, :])
        wide = total.to(tl.float32)
        gain = tl.load(gain_ptr + n).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * gain[:, None]).to(dtype), mask=valid[None, :])
        squares = tl.sum(wide.to(tl.float64) * wide.to(tl.float64), 0)
        tl.store(out_squares_ptr + m * (N // BN) + tile, squares, mask=valid)
    else:
        tl.store(out_ptr + place, a.to(out_ptr.dtype.element_ty), mask=valid[None, :])


@triton.jit
def _matvec(
    x_ptr,
    weight_ptr,
    bias_ptr,
    gain_ptr,
    out_ptr,
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The same for a single row, without tensor cores; NORM: of x, by the sum of squares that every program computes.

    Before it waits, a program loads its first tile and asks the L2 for the rest of its rows or, where one tile is all,
    for the rows of program pid + AHEAD.
    """
    EVEN: tl.constexpr = K % BK == 0
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    weights = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    w = _load_weights(weights, k, K, EVEN)
    u = w
    if GLU:
        u = _load_weights(weights + N * K, k, K, EVEN)
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            line = tl.arange(0, BK // 64) * 64
            rest = weight_ptr + n[:, None].to(tl.int64) * K + line[None, :]
            if K > BK:
                for i in tl.static_range(1, min(4, K // BK)):
                    _prefetch(rest + i * BK)
                    if GLU:
                        _prefetch(rest + N * K + i * BK)
            elif pid < AHEAD and pid + AHEAD < N // BN:
                _prefetch(rest + AHEAD * BN * K)
                if GLU:
                    _prefetch(rest + N * K + AHEAD * BN * K)
        gdc_wait()
    a = tl.zeros([BN, BK], tl.float32)
    b = a
    squares = tl.zeros([BK], tl.float32)
    for k0 in tl.static_range(0, K, BK):
        here = k0 + k
        wide_w = w.to(tl.float32)
        wide_u = u.to(tl.float32)
        if k0 + BK < K:
            w = _load_weights(weights + k0 + BK, here + BK, K, EVEN)
            if GLU:
                u = _load_weights(weights + (N * K + k0 + BK), here + BK, K, EVEN)
        x = tl.load(x_ptr + here, mask=here < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + here, mask=here < K, other=0.0).to(tl.float32)
        a += wide_w * x[None, :]
        if GLU:
            b += wide_u * x[None, :]
    y = tl.sum(a, 1)
    norm = tl.rsqrt(tl.sum(squares, 0) / K + epsilon) if NORM else 1.0
    y *= norm
    if BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)
    if GLU:
        up = tl.sum(b, 1) * norm
        if BIAS:
            up += tl.load(bias_ptr + N + n).to(tl.float32)
        y = _activate(y, up, ACTIVATION)
    y = _softcap(y, SOFTCAP)
    if RESIDUAL:
        y += tl.load(out_ptr + n).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _load_weights(pointers, k, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _add(
    part_ptr,
    route_ptr,
    count_ptr,
    own_gain_ptr,
    gain_ptr,
    hidden_ptr,
    scaled_ptr,
    squares_ptr,
    epsilon,
    K: tl.constexpr,
    BK: tl.constexpr,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTS: tl.constexpr,
    NORM: tl.constexpr,
    NT: tl.constexpr,
    NTP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the result of a layer's part to the residual of each row; also writes the sum times the next norm's gain,
    and its sum of squares, as `_linear` does.

    EXPERTS: the result is the weighted sum of TOP parts, and the experts' lists are emptied. NORM: it is normed first.
    """
    row = tl.program_id(0)
    k = tl.arange(0, BK)
    inside = k < K
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    gain = tl.load(gain_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros([BK], tl.float32)
    for i in tl.static_range(TOP):
        part = tl.load(part_ptr + (row * TOP + i).to(tl.int64) * K + k, mask=inside, other=0.0).to(tl.float32)
        y += part * tl.load(route_ptr + row * TOP + i) if EXPERTS else part
    if EXPERTS:  # noqa: SIM102 (known when the kernel is compiled)
        if row == 0:
            place = tl.arange(0, COUNTS)
            tl.store(count_ptr + place, tl.zeros([COUNTS], tl.int32))
    if NORM:
        wide = y.to(dtype).to(tl.float32)
        mean = tl.sum(wide.to(tl.float64) * wide.to(tl.float64), 0).to(tl.float32) / K
        y = wide * tl.rsqrt(mean + epsilon) * tl.load(own_gain_ptr + k, mask=inside, other=0.0).to(tl.float32)
    hidden = hidden_ptr + row.to(tl.int64) * K + k
    total = (y + tl.load(hidden, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(hidden, total, mask=inside)
    wide = total.to(tl.float32)
    tl.store(scaled_ptr + row.to(tl.int64) * K + k, (wide * gain).to(dtype), mask=inside)
    index = tl.arange(0, NTP)
    squares = tl.sum(wide.to(tl.float64) * wide.to(tl.float64), 0)
    tl.store(squares_ptr + row * NT + index, tl.where(index == 0, squares, 0.0), mask=index < NT)


def next_power(n: int) -> int:
    power: int = triton.next_power_of_2(n)
    return power


def launch_options(pdl: bool, **options: Any) -> dict[str, Any]:
    """Products and sums are never contracted: the same formula gives the same bits in every kernel."""
    return options | {"enable_fp_fusion": False, "PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def embed(
    inputs: Mapping[str, Tensor],
    settings: Tensor | None,
    embedding: Tensor,
    gain: Tensor,
    hidden: Tensor,
    scaled: Tensor,
    squares: Tensor,
    scale: float,
) -> None:
    """`settings`: those of the sampler, which get each row's random number."""
    rows, size = hidden.shape
    parts = squares.shape[1]
    _embed[(rows,)](
        inputs["token"],
        inputs["position"],
        inputs["state"],
        inputs["start"],
        squares if settings is None else settings,
        embedding,
        gain,
        hidden,
        scaled,
        squares,
        scale,
        K=size,
        BK=next_power(size),
        NT=parts,
        NTP=next_power(parts),
        SETTINGS=0 if settings is None else settings.shape[1],
        SAMPLES=settings is not None,
        num_warps=8,
    )


def advance(results: Tensor, on_host: Tensor, sampled: Tensor, inputs: Mapping[str, Tensor], rows: int) -> None:
    """`on_host`: pinned memory, which the device can write to."""
    columns = (inputs[name] for name in ("token", "position", "rotary", "live"))
    width = results.shape[1]
    _advance[(rows,)](results, on_host, sampled, *columns, WIDTH=width, PADDED=next_power(width), num_warps=1)


def replace_tokens(results: Tensor, sampled: Tensor, inputs: Mapping[str, Tensor]) -> None:
    rows, width = results.shape
    _replace_tokens[(rows,)](results, sampled, inputs["token"], inputs["live"], WIDTH=width, num_warps=1)


def load_rows(new: Tensor, sampled: Tensor, table: Tensor, settings: Tensor) -> None:
    """`new`: [fields, source and settings, rows], all as integers; see `_load_rows`."""
    size = new.shape[1]
    _load_rows[(-(-size // 128),)](
        new,
        sampled,
        table,
        settings,
        size,
        table.shape[1],
        min(size, len(settings)),
        FIELDS=table.shape[0],
        SETTINGS=settings.shape[1],
        BLOCK=128,
        num_warps=4,
    )


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
