"""Triton kernels of layers that are mixtures of experts, for the passes of `cuda_step.py`.

The device routes: the host never learns which experts a row takes. `_route` picks the experts of each row and enters
the pairs of a row and an expert into the expert's list; the order in a list is that of arrival, which changes no bit,
as a row's bits don't depend on its place in a tile. `_expert_linear` computes the products of each expert with the rows
in its list, and `_add` sums the results of a row in the order of its experts' ranks.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from palaver.engines.torch.kernel_functions import rounded
from palaver.engines.torch.linear_kernels import _activate, _load_weights


@triton.jit(do_not_specialize=["capacity"])
def _route(
    logits_ptr,
    live_ptr,
    expert_ptr,
    weight_ptr,
    count_ptr,
    member_ptr,
    capacity,
    E: tl.constexpr,
    EP: tl.constexpr,
    STRIDE: tl.constexpr,
    TOP: tl.constexpr,
    TOPP: tl.constexpr,
    NORMALISED: tl.constexpr,
    LISTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP likeliest of E experts of each row, and their weights: a softmax over all experts, or over the chosen
    ones (NORMALISED). LISTS: also enters the pairs into the lists of the experts; not those of padding.

    `count`: the length of each expert's list, the number of experts with any pair, and those experts."""
    row = tl.program_id(0)
    expert = tl.arange(0, EP)
    rank = tl.arange(0, TOPP)
    chosen = tl.zeros([TOPP], tl.int32)
    scores = tl.full([TOPP], float("-inf"), tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits_ptr + row * STRIDE + expert, mask=expert < E, other=float("-inf"))
    highest = tl.max(x, 0)
    total = tl.sum(tl.exp(x - highest), 0)
    for i in tl.static_range(TOP):
        best = tl.max(x, 0)
        index = tl.min(tl.where(x == best, expert, EP), 0)
        chosen = tl.where(rank == i, index, chosen)
        scores = tl.where(rank == i, best, scores)
        x = tl.where(expert == index, float("-inf"), x)
    weights = tl.exp(scores - highest)
    if NORMALISED:
        total = tl.sum(weights, 0)
    inside = rank < TOP
    tl.store(expert_ptr + row * TOP + rank, chosen, mask=inside)
    tl.store(weight_ptr + row * TOP + rank, weights / total, mask=inside)
    if LISTS:
        listed = inside & (tl.load(live_ptr + row) != 0)
        place = tl.atomic_add(count_ptr + chosen, 1, mask=listed)
        tl.store(member_ptr + chosen * capacity + place, row * TOP + rank, mask=listed)
        first = listed & (place == 0)
        active = tl.atomic_add(count_ptr + E + tl.zeros([TOPP], tl.int32), 1, mask=first)
        tl.store(count_ptr + E + 1 + active, chosen, mask=first)


@triton.jit
def _decode_fp4(codes, exponents, dtype: tl.constexpr):
    """The numbers of the low four bits of bytes, [outputs, inputs], with an exponent for each output."""
    sign = (codes & 8).to(tl.int16) << 12
    magnitude = (codes & 7).to(tl.int16) << 9
    number = (sign | magnitude).to(tl.float16, bitcast=True).to(tl.float32)  # less a factor of 2^14
    factor = ((exponents.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)
    return (number * factor[:, None]).to(dtype)


@triton.jit
def _narrow_dot(codes_ptr, exponent_ptr, first_x, second_x, a):
    """Adds the products of a block of `mxfp4.py` and the inputs of its two groups, [32, rows] each."""
    codes = tl.load(codes_ptr)
    a = tl.dot(_decode_fp4(codes, tl.load(exponent_ptr), first_x.dtype), first_x, a, input_precision="ieee")
    high = _decode_fp4(codes >> 4, tl.load(exponent_ptr + 64), second_x.dtype)
    return tl.dot(high, second_x, a, input_precision="ieee")


@triton.jit(do_not_specialize=["capacity"])
def _expert_linear(
    x_ptr,
    weight_ptr,
    exponent_ptr,
    bias_ptr,
    squares_ptr,
    count_ptr,
    member_ptr,
    out_ptr,
    capacity,
    epsilon,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    NT: tl.constexpr,
    NTP: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NARROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_linear`, for the pairs in the list of each expert: out[pair, n] = sum_k weight[expert, n, k] * x[.., k].

    BY_ROW: x has a row for each token, not for each pair. GLU: an expert has N outputs of gate and N of up, one kind
    after the other or by turns (INTERLEAVED). Program (i, tile) computes BN outputs of the i-th expert in use.
    NARROW: the weights are blocks of `mxfp4.py`; BN and BK are then 64, as the order of sums depends on BK.
    """
    active = tl.program_id(0) // (N // BN)
    tile = tl.program_id(0) % (N // BN)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    OUTPUTS: tl.constexpr = 2 * N if GLU else N
    STRIDE: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if active >= tl.load(count_ptr + E):
        return
    expert = tl.load(count_ptr + E + 1 + active).to(tl.int64)
    count = tl.load(count_ptr + expert)
    weight_rows = weight_ptr + (expert * OUTPUTS + n * STRIDE)[:, None] * K + k[None, :]
    for first in range(0, count, BM):
        m = first + tl.arange(0, BM)
        valid = m < count
        pair = tl.load(member_ptr + expert * capacity + m, mask=valid, other=0)
        row = pair // TOP if BY_ROW else pair
        weights = weight_rows
        inputs = x_ptr + row[None, :].to(tl.int64) * K + k[:, None]
        a = tl.zeros([BN, BM], tl.float32)
        b = tl.zeros([BN, BM], tl.float32)
        if NARROW:
            column = tl.arange(0, 32)
            block = (expert * (OUTPUTS // 64) + tile) * (K // 64)
            codes = weight_ptr + block * 2048 + tl.arange(0, 64)[:, None] * 32 + column[None, :]
            exponents = exponent_ptr + block * 128 + tl.arange(0, 64)
            narrow_inputs = x_ptr + row[None, :].to(tl.int64) * K + column[:, None]
            for i in tl.range(0, K // 64, num_stages=STAGES):
                first_x = tl.load(narrow_inputs + i * 64, mask=valid[None, :], other=0.0)
                second_x = tl.load(narrow_inputs + (i * 64 + 32), mask=valid[None, :], other=0.0)
                a = _narrow_dot(codes + i * 2048, exponents + i * 128, first_x, second_x, a)
                if GLU:
                    up = N // 64 * (K // 64) + i
                    b = _narrow_dot(codes + up * 2048, exponents + up * 128, first_x, second_x, b)
        else:
            for _ in tl.range(0, K // BK, num_stages=STAGES):
                x = tl.load(inputs, mask=valid[None, :], other=0.0)
                a = tl.dot(tl.load(weights), x, a, input_precision="ieee")
                if GLU:
                    b = tl.dot(tl.load(weights + UP * K), x, b, input_precision="ieee")
                weights += BK
                inputs += BK
            if K == BK:
                a = rounded(a)
                b = rounded(b)
        if NT > 0:
            index = tl.arange(0, NTP)
            squares = squares_ptr + row[:, None] * NT + index[None, :]
            inside = valid[:, None] & (index < NT)[None, :]
            norm = tl.rsqrt(tl.sum(tl.load(squares, mask=inside, other=0.0), 1).to(tl.float32) / K + epsilon)
            a *= norm[None, :]
            b *= norm[None, :]
        if BIAS:
            biases = bias_ptr + expert * OUTPUTS + n * STRIDE
            a += tl.load(biases).to(tl.float32)[:, None]
            if GLU:
                b += tl.load(biases + UP).to(tl.float32)[:, None]
        if GLU:
            a = _activate(a, b, ACTIVATION)
        place = pair[None, :].to(tl.int64) * N + n[:, None]
        tl.store(out_ptr + place, a.to(out_ptr.dtype.element_ty), mask=valid[None, :])


@triton.jit
def _expert_gate_up(
    x_ptr,
    weight_ptr,
    bias_ptr,
    gain_ptr,
    expert_ptr,
    out_ptr,
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate and up of a single row's experts without tensor cores, as `_matvec`: program (i, tile) computes BN outputs
    of the row's i-th expert."""
    EVEN: tl.constexpr = K % BK == 0
    rank = tl.program_id(0) // (N // BN)
    n = tl.program_id(0) % (N // BN) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    STRIDE: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(expert_ptr + rank).to(tl.int64)
    outputs = expert * 2 * N + n * STRIDE
    weights = weight_ptr + outputs[:, None] * K + k[None, :]
    a = tl.zeros([BN, BK], tl.float32)
    b = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for k0 in tl.static_range(0, K, BK):
        here = k0 + k
        w = _load_weights(weights + k0, here, K, EVEN).to(tl.float32)
        u = _load_weights(weights + (UP * K + k0), here, K, EVEN).to(tl.float32)
        x = tl.load(x_ptr + here, mask=here < K, other=0.0).to(tl.float32)
        squares += x * x
        x *= tl.load(gain_ptr + here, mask=here < K, other=0.0).to(tl.float32)
        a += w * x[None, :]
        b += u * x[None, :]
    norm = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    gate = tl.sum(a, 1) * norm
    up = tl.sum(b, 1) * norm
    if BIAS:
        gate += tl.load(bias_ptr + outputs).to(tl.float32)
        up += tl.load(bias_ptr + outputs + UP).to(tl.float32)
    tl.store(out_ptr + rank * N + n, _activate(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty))


@triton.jit
def _expert_down(
    x_ptr,
    weight_ptr,
    bias_ptr,
    expert_ptr,
    route_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of a single row's experts; RESIDUAL: adds it to `out`."""
    EVEN: tl.constexpr = K % BK == 0
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros([BN], tl.float32)
    for rank in tl.static_range(TOP):
        expert = tl.load(expert_ptr + rank).to(tl.int64)
        weights = weight_ptr + (expert * N + n)[:, None] * K + k[None, :]
        a = tl.zeros([BN, BK], tl.float32)
        for k0 in tl.static_range(0, K, BK):
            here = k0 + k
            w = _load_weights(weights + k0, here, K, EVEN).to(tl.float32)
            x = tl.load(x_ptr + rank * K + here, mask=here < K, other=0.0).to(tl.float32)
            a += w * x[None, :]
        part = tl.sum(a, 1)
        if BIAS:
            part += tl.load(bias_ptr + expert * N + n).to(tl.float32)
        y += part * tl.load(route_ptr + rank)
    if RESIDUAL:
        y += tl.load(out_ptr + n).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty))
