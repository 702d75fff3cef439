"""Triton kernels of linear layers, for weights stored as [out, in]: floats, and packed ones of quantised models.

A product sums over K in steps of the tensor cores' depth, in `split` parts that are joined in order, whatever the shape
of the tiles that compute it: a row's bits don't depend on the rows beside it. `_matvec` is the exception: quicker for a
single row, with sums in an order of its own.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from palaver.engines.torch.kernel_functions import INTERPRETED, prefetch, rounded, tanh

UNROLLED = tl.constexpr(4)
"""Parts of a sum up to which a program's loop over them is unrolled. 15 took two minutes to compile."""
SWIGLU_ALPHA = tl.constexpr(1.702)
SWIGLU_LIMIT = tl.constexpr(7.0)


@triton.jit
def _softcap(x, SOFTCAP: tl.constexpr):
    """SOFTCAP 0: none."""
    if SOFTCAP > 0:
        x = SOFTCAP * tanh(x / SOFTCAP)
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
        gate = gate * tl.sigmoid(gate * SWIGLU_ALPHA)
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
    return rounded(summed) if STEPS == 1 else summed


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
            prefetch(ahead + i * BK)
            if GLU:
                prefetch(ahead + N * K + i * BK)
    if PDL:
        gdc_wait()
    a = tl.zeros([BN, BM], tl.float32)
    b = tl.zeros([BN, BM], tl.float32)
    if PARALLEL or SPLIT == 1:
        for i in tl.range(0, STEPS, num_stages=STAGES):
            if DISTANCE > 1 and DISTANCE < STEPS:
                far = tl.minimum(i + DISTANCE, STEPS - 1) * BK
                prefetch(ahead + far)
                if GLU:
                    prefetch(ahead + N * K + far)
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
        a = rounded(a)
        b = rounded(b)
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
    norm = _norm(squares_ptr, m, valid, epsilon, K, NT, NTP, NTP)
    squares = _finish(
        a,
        b,
        norm,
        n,
        m,
        valid,
        bias_ptr,
        gain_ptr,
        out_ptr,
        scaled_ptr,
        N,
        NT > 0,
        BIAS,
        GLU,
        ACTIVATION,
        SOFTCAP,
        RESIDUAL,
    )
    if RESIDUAL:
        tl.store(out_squares_ptr + m * (N // BN) + tile, squares, mask=valid)


@triton.jit
def _norm(
    squares_ptr,
    m,
    valid,
    epsilon,
    K: tl.constexpr,
    NT: tl.constexpr,
    NTP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The factors of rows whose sums of squares are in NT parts; NT = 0: 1. The parts are added in float64, AT_ONCE of
    each row at a time."""
    total = tl.zeros(m.shape, tl.float64)
    if NT > 0:
        index = tl.arange(0, AT_ONCE)
        squares = squares_ptr + m[:, None] * NT + index[None, :]
        if AT_ONCE == NTP:
            inside = valid[:, None] & (index < NT)[None, :]
            total = tl.sum(tl.load(squares, mask=inside, other=0.0), 1)
        else:
            for first in tl.range(0, NT, AT_ONCE, num_stages=1):
                inside = valid[:, None] & (first + index < NT)[None, :]
                total += tl.sum(tl.load(squares + first, mask=inside, other=0.0), 1)
    return tl.rsqrt(total.to(tl.float32) / K + epsilon)


@triton.jit
def _finish(
    a,
    b,
    norm,
    n,
    m,
    valid,
    bias_ptr,
    gain_ptr,
    out_ptr,
    scaled_ptr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Writes the results of a tile, from its sums a and, with GLU, those of up in b. Returns the sums of the rows'
    squares, which are 0 without RESIDUAL."""
    if NORM:
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
    squares = tl.zeros(m.shape, tl.float64)
    if RESIDUAL:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        total = (a + tl.load(out_ptr + place, mask=valid[None, :], other=0.0).to(tl.float32)).to(dtype)
        tl.store(out_ptr + place, total, mask=valid[None, :])
        wide = total.to(tl.float32)
        gain = tl.load(gain_ptr + n).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * gain[:, None]).to(dtype), mask=valid[None, :])
        squares = tl.sum(wide.to(tl.float64) * wide.to(tl.float64), 0)
    else:
        tl.store(out_ptr + place, a.to(out_ptr.dtype.element_ty), mask=valid[None, :])
    return squares


@triton.jit
def _gate_and_up(a, BM: tl.constexpr):
    """Both halves of a block of `_linear_blocks`. A thread has them both, so nothing moves."""
    a = tl.permute(tl.reshape(a, [4, 2, 8, BM]), (0, 2, 3, 1))
    gate, up = tl.split(a)
    return tl.reshape(gate, [32, BM]), tl.reshape(up, [32, BM])


@triton.jit
def _finish_block(
    a,
    norm,
    first,
    m,
    valid,
    bias_ptr,
    gain_ptr,
    out_ptr,
    scaled_ptr,
    N: tl.constexpr,
    BM: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """`_finish` for the sums of a block of 64 weights, whose first output is `first`."""
    b = a
    if GLU:
        a, b = _gate_and_up(a, BM)
    n = first + tl.arange(0, 32 if GLU else 64)
    return _finish(
        a,
        b,
        norm,
        n,
        m,
        valid,
        bias_ptr,
        gain_ptr,
        out_ptr,
        scaled_ptr,
        N,
        NORM,
        BIAS,
        GLU,
        ACTIVATION,
        0.0,
        RESIDUAL,
    )


@triton.jit(do_not_specialize=["rows"])
def _linear_blocks(
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    gain_ptr,
    out_ptr,
    scaled_ptr,
    out_squares_ptr,
    rows,
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    NT: tl.constexpr,
    NTP: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """As `_linear`, with float weights and K in one part: a program computes three blocks of 64 weights, 192 in all.
    That divides some products so that all processors have the same work, which no power of two does.

    With GLU a block has 32 weights of gate and 32 of up, eight of each in turn (`_gate_and_up`).
    """
    pid = tl.program_id(0)
    row_tiles = (rows + BM - 1) // BM
    row_tile = pid % row_tiles
    tile = pid // row_tiles
    BLOCK: tl.constexpr = 32 if GLU else 64
    m = row_tile * BM + tl.arange(0, BM)
    valid = m < rows
    k = tl.arange(0, BK)
    line = tl.arange(0, 64)
    if GLU:
        line = line // 16 * 8 + line % 8 + line // 8 % 2 * N
    first = tile * 3 * BLOCK
    weights = weight_ptr + (first + line)[:, None].to(tl.int64) * K + k[None, :]
    inputs = x_ptr + m[None, :].to(tl.int64) * K + k[:, None]
    a = tl.zeros([64, BM], tl.float32)
    b = a
    c = a
    for _ in tl.range(0, K // BK, num_stages=STAGES):
        x = tl.load(inputs, mask=valid[None, :], other=0.0)
        a = tl.dot(tl.load(weights), x, a, input_precision="ieee")
        b = tl.dot(tl.load(weights + BLOCK * K), x, b, input_precision="ieee")
        c = tl.dot(tl.load(weights + 2 * BLOCK * K), x, c, input_precision="ieee")
        weights += BK
        inputs += BK
    if K == BK:
        a = rounded(a)
        b = rounded(b)
        c = rounded(c)
    norm = _norm(squares_ptr, m, valid, epsilon, K, NT, NTP, min(8, NTP))
    NORM: tl.constexpr = NT > 0
    squares = _finish_block(
        a, norm, first, m, valid, bias_ptr, gain_ptr, out_ptr, scaled_ptr, N, BM, NORM, BIAS, GLU, ACTIVATION, RESIDUAL
    )
    first += BLOCK
    squares += _finish_block(
        b, norm, first, m, valid, bias_ptr, gain_ptr, out_ptr, scaled_ptr, N, BM, NORM, BIAS, GLU, ACTIVATION, RESIDUAL
    )
    first += BLOCK
    squares += _finish_block(
        c, norm, first, m, valid, bias_ptr, gain_ptr, out_ptr, scaled_ptr, N, BM, NORM, BIAS, GLU, ACTIVATION, RESIDUAL
    )
    if RESIDUAL:
        tl.store(out_squares_ptr + m * (N // (3 * BLOCK)) + tile, squares, mask=valid)


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
                    prefetch(rest + i * BK)
                    if GLU:
                        prefetch(rest + N * K + i * BK)
            elif pid < AHEAD and pid + AHEAD < N // BN:
                prefetch(rest + AHEAD * BN * K)
                if GLU:
                    prefetch(rest + N * K + AHEAD * BN * K)
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
