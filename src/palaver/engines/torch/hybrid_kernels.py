"""Triton kernels for layers of hybrid models that the library computes by dozens of small operations: the gated delta
rule with its convolution, and norms.

`LayerKernels` takes the place of such layers in a model of the library. Each kind of layer is compared with the
library's own code before.

The gated delta rule keeps a state S for each head, [keys, values]. A token with the key k, the value v, the query q,
the decay g and the rate b changes it and reads it:

    S = exp(g) S;  S = S + k (b (v - S'k))';  o = S'q

`_decay_and_write` does just that for one token of each sequence. A prompt is computed in blocks of 64 tokens: what the
tokens of a block write depends on each other by a triangular system, which `_solve_blocks` solves for all blocks at
once; `_scan_blocks` then takes the state from block to block."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch import kernel_functions

_log = logging.getLogger(__name__)

BLOCK = 64
"""Tokens of a prompt that are computed together."""
VALUES = 32
"""Columns of a state that one program computes: they don't depend on each other."""
FEW_ROWS = 4
"""Up to so many sequences a decode pass has programs of VALUES columns; with more, each has all columns of a head."""
STAGES = 2
"""Blocks that `_scan_blocks` has loads of under way, where it has memory for them."""
STAGES_BYTES = 160 << 10
"""What a program must be able to take for that: consumer GPUs have 99 KiB, others more."""
CHANNELS = 128
"""Channels of a convolution that one program computes."""
PROBE_TOKENS = (100, 49, 1)
"""The parts in which a layer is compared: across blocks, from a state, and of a single token."""
MAX_ERROR = 0.02
"""By how much the results of a layer may differ, relative to their size: rounding in bfloat16 comes to a few
thousandths."""


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit(do_not_specialize=["tokens"])
def _convolve(
    x_ptr,
    state_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """The causal convolution of each channel with its last WIDTH inputs, and SiLU. Inputs before the first token are in
    the state, [channels, STATE]; with SINGLE tokens, one a sequence, the state gets the new input, too."""
    token, channel = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    sequence = token // tokens
    place = tl.full([BLOCK_C], 0, tl.int32) + (token - sequence * tokens)
    state = state_ptr + (sequence.to(tl.int64) * C + channel) * STATE
    total = tl.zeros([BLOCK_C], tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        known = tl.load(state + STATE + place - back, mask=inside & (place < back), other=0.0)
        new = tl.load(x_ptr + (token - back).to(tl.int64) * C + channel, mask=inside & (place >= back), other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        total += weight * tl.where(place < back, known, new).to(tl.float32)
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * C + channel, _silu(total).to(out_ptr.dtype.element_ty), mask=inside)
    if SINGLE:
        for at in tl.static_range(STATE - 1):
            tl.store(state + at, tl.load(state + at + 1, mask=inside, other=0.0), mask=inside)
        last = tl.load(x_ptr + token.to(tl.int64) * C + channel, mask=inside, other=0.0)
        tl.store(state + STATE - 1, last.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rates(a_ptr, b_ptr, log_ptr, bias_ptr, at, head, mask):
    """The logarithm of the decay and the rate of writing."""
    b = tl.load(b_ptr + at, mask=mask, other=0.0)
    rate = (1 / (1 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    x = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32) + tl.load(bias_ptr + head).to(tl.float32)
    soft = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
    decay = -tl.exp(tl.load(log_ptr + head).to(tl.float32)) * soft
    return tl.where(mask, decay, 0.0), tl.where(mask, rate, 0.0)


@triton.jit
def _decay_and_write(
    qkv_ptr,
    a_ptr,
    b_ptr,
    log_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    scale,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """One token of each sequence."""
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, K), tl.program_id(2) * BV + tl.arange(0, BV)
    qkv = qkv_ptr + row.to(tl.int64) * (2 * KH * K + VH * V)
    first = head // (VH // KH) * K
    q = tl.load(qkv + first + key).to(tl.float32)
    k = tl.load(qkv + KH * K + first + key).to(tl.float32)
    v = tl.load(qkv + 2 * KH * K + head * V + value).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    decay, rate = _rates(a_ptr, b_ptr, log_ptr, bias_ptr, row * VH + head, head, row >= 0)
    place = state_ptr + ((row.to(tl.int64) * VH + head) * K + key[:, None]) * V + value[None, :]
    state = tl.load(place).to(tl.float32) * tl.exp(decay)
    change = (v - tl.sum(state * k[:, None], 0)) * rate
    state += k[:, None] * change[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty))
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (row * VH + head) * V + value, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _load_normed(ptr, token, first, stride, inside, K: tl.constexpr):
    """Vectors of length 1, [tokens, K]; 0 outside."""
    key = tl.arange(0, K)
    x = tl.load(ptr + token[:, None] * stride + first + key[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _invert(system, scratch_ptr, BT: tl.constexpr):
    """The inverse of 1 + system, which is strictly lower triangular: its diagonal blocks of PART rows by substitution,
    row by row, as powers of the whole system would cancel each other. `scratch` has room for BT * BT numbers."""
    PART: tl.constexpr = 16
    row = tl.arange(0, BT)
    cell = scratch_ptr + row[:, None] * BT + row[None, :]
    own = tl.arange(0, PART)
    parts = tl.arange(0, BT // PART)
    diagonal = scratch_ptr + parts[:, None, None] * PART * (BT + 1) + own[None, :, None] * BT + own[None, None, :]
    tl.store(cell, system)
    tl.debug_barrier()
    small = tl.load(diagonal)
    inverse = tl.where((own[:, None] == own[None, :])[None, :, :], 1.0, 0.0 * small)
    for i in range(1, PART):
        here = (own == i)[None, :, None]
        change = tl.sum(tl.sum(tl.where(here, small, 0.0), 1)[:, :, None] * inverse, 1)
        inverse = tl.where(here, inverse - change[:, None, :], inverse)
    tl.debug_barrier()
    tl.store(diagonal, inverse)
    tl.debug_barrier()
    same = (row // PART)[:, None] == (row // PART)[None, :]
    blocks = tl.where(same, tl.load(cell), 0.0)
    tl.debug_barrier()
    rest = tl.dot(blocks, tl.where(same, 0.0, system), input_precision="tf32x3")
    squared = tl.dot(rest, rest, input_precision="tf32x3")  # its fourth power is 0
    blocks += tl.dot(squared, blocks, input_precision="tf32x3")
    return blocks - tl.dot(rest, blocks, input_precision="tf32x3")


@triton.jit(do_not_specialize=["tokens"])
def _solve_blocks(
    qkv_ptr,
    a_ptr,
    b_ptr,
    log_ptr,
    bias_ptr,
    decay_ptr,
    read_ptr,
    write_ptr,
    score_ptr,
    tokens,
    scale,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    """Of each block and head: the decays since its start, as logarithms; what its tokens read of the state before it
    and write to it, if they are the only ones; and how much each token reads of what those up to it write."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BT)
    token = (block * BT + row).to(tl.int64)
    inside = token < tokens
    stride: tl.constexpr = 2 * KH * K + VH * V
    first = head // (VH // KH) * K
    k = _load_normed(qkv_ptr, token, KH * K + first, stride, inside, K)
    decay, rate = _rates(a_ptr, b_ptr, log_ptr, bias_ptr, token * VH + head, head, inside)
    since = tl.cumsum(decay, 0)
    tl.store(decay_ptr + token * VH + head, since, mask=inside)
    earlier = row[:, None] > row[None, :]
    kept = tl.exp(tl.where(earlier, since[:, None] - since[None, :], 0.0))
    system = tl.where(earlier, rate[:, None] * tl.dot(k, tl.trans(k), input_precision="tf32") * kept, 0.0)
    q = _load_normed(qkv_ptr, token, first, stride, inside, K) * scale
    scores = tl.where(row[:, None] >= row[None, :], tl.dot(q, tl.trans(k), input_precision="tf32") * kept, 0.0)
    cell = score_ptr + (block * VH + head) * BT * BT
    inverse = _invert(system, cell, BT)
    tl.store(cell + row[:, None] * BT + row[None, :], scores)
    value = tl.arange(0, V)
    at = token[:, None] * stride + 2 * KH * K + head * V + value[None, :]
    v = tl.load(qkv_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    writes = tl.dot(inverse, v * rate[:, None], input_precision="tf32")
    tl.store(write_ptr + (token * VH + head)[:, None] * V + value[None, :], writes, mask=inside[:, None])
    reads = tl.dot(inverse, k * (rate * tl.exp(since))[:, None], input_precision="tf32")
    key = tl.arange(0, K)
    tl.store(read_ptr + (token * VH + head)[:, None] * K + key[None, :], reads, mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _scan_blocks(
    qkv_ptr,
    decay_ptr,
    read_ptr,
    write_ptr,
    score_ptr,
    state_ptr,
    out_ptr,
    tokens,
    scale,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
):
    """Computes the results of all tokens of one sequence and its last state, from what `_solve_blocks` left."""
    head = tl.program_id(0)
    row, key, value = tl.arange(0, BT), tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    stride: tl.constexpr = 2 * KH * K + VH * V
    first = head // (VH // KH) * K
    place = state_ptr + (head * K + key[:, None]) * V + value[None, :]
    state = tl.load(place).to(tl.float32)
    for block in range(tl.cdiv(tokens, BT)):
        token = (block * BT + row).to(tl.int64)
        inside = token < tokens
        reads = tl.load(read_ptr + (token * VH + head)[:, None] * K + key[None, :], mask=inside[:, None], other=0.0)
        own = (token * VH + head)[:, None] * V + value[None, :]
        writes = tl.load(write_ptr + own, mask=inside[:, None], other=0.0)
        writes -= tl.dot(reads, state, input_precision="tf32")
        since = tl.load(decay_ptr + token * VH + head, mask=inside, other=0.0)
        q = _load_normed(qkv_ptr, token, first, stride, inside, K) * (scale * tl.exp(since))[:, None]
        cell = (block * VH + head) * BT * BT + row[:, None] * BT + row[None, :]
        out = tl.dot(q, state, input_precision="tf32")
        out += tl.dot(tl.load(score_ptr + cell), writes, input_precision="tf32")
        tl.store(out_ptr + own, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        total = tl.min(since, 0)  # decays only add up
        k = _load_normed(qkv_ptr, token, KH * K + first, stride, inside, K)
        k *= tl.where(inside, tl.exp(total - since), 0.0)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(k), writes, input_precision="tf32")
    tl.store(place, state.to(state_ptr.dtype.element_ty))


@triton.jit
def _norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    stride,
    epsilon,
    N: tl.constexpr,
    BN: tl.constexpr,
    CENTRED: tl.constexpr,
    GATED: tl.constexpr,
):
    """RMSNorm of each row, rounded as the library does. CENTRED: weights are differences from 1, and the product is
    rounded once; else the normed row is rounded before. GATED: times SiLU of the gate."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    inside = column < N
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / N + epsilon)
    if CENTRED:
        x *= 1 + weight
    else:
        x = (x.to(dtype).to(tl.float32) * weight).to(weight_ptr.dtype.element_ty).to(tl.float32)
    if GATED:
        x *= _silu(tl.load(gate_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32))
    tl.store(out_ptr + row * N + column, x.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, centred: bool, gate: Tensor | None = None) -> Tensor:
    """Of the last dimension. `gate`: contiguous, of the same shape."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm[(len(rows),)](
        rows,
        rows if gate is None else gate,
        weight,
        out,
        rows.stride(0),
        epsilon,
        N=size,
        BN=triton.next_power_of_2(size),
        CENTRED=centred,
        GATED=gate is not None,
        num_warps=4 if size > 512 else 1,
    )
    return out


class GatedDeltaLayer:
    """The forward of a layer with the gated delta rule, as Qwen3-Next and Qwen3.5 have it."""

    def __init__(self, module: Any) -> None:
        """Raises UnsupportedModel for layers that the kernels don't know."""
        try:
            self._module = module
            self._index: int = module.layer_idx
            self._key_heads, self._value_heads = module.num_k_heads, module.num_v_heads
            self._key_size, self._value_size = module.head_k_dim, module.head_v_dim
            convolution = module.conv1d
            known = (
                convolution.bias is None and module.activation in ("silu", "swish") and module.norm.weight.dim() == 1
            )
            self._weight = convolution.weight.detach()[:, 0].contiguous()
            self._norm_weight, self._epsilon = module.norm.weight, module.norm.variance_epsilon
            self._ordered = hasattr(module, "in_proj_qkv")
            known = known and (self._ordered or hasattr(module, "fix_query_key_value_ordering"))
        except AttributeError as error:
            raise UnsupportedModel(f"a layer of another kind: {error}") from error
        sizes = (self._key_size, self._value_size)
        if not known or any(size not in (32, 64, 128, 256) for size in sizes) or self._value_heads % self._key_heads:
            raise UnsupportedModel("a gated delta rule in sizes that the kernels don't know")
        self._heads: dict[str, Any] = {
            "KH": self._key_heads,
            "VH": self._value_heads,
            "K": self._key_size,
            "V": self._value_size,
        }
        self._rates = (module.A_log.detach(), module.dt_bias.detach())
        self._stages = STAGES if kernel_functions.shared_memory(self._weight.device) >= STAGES_BYTES else 1

    def __call__(self, hidden_states: Tensor, cache_params: Any = None, **_: Any) -> Tensor:
        """`cache_params`: with the states of the rows, which change in place. Either one row or single tokens."""
        layer = cache_params.layers[self._index]
        convolved, states = layer.conv_states[0], layer.recurrent_states[0]
        if not layer.has_previous_state[0]:
            convolved.zero_()
            states.zero_()
        mixed, z, b, a = self._project(hidden_states)
        single = hidden_states.shape[1] == 1
        qkv = self._convolve(mixed, convolved, single)
        out = torch.empty_like(z)
        (self._decode if single else self._prefill)(qkv, a, b, states, out)
        out = rms_norm(out, self._norm_weight, self._epsilon, False, z)
        result: Tensor = self._module.out_proj(out.view(*hidden_states.shape[:2], -1))
        return result

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side; the gate; what rates of writing and decays are made of."""
        module, shape = self._module, (*hidden.shape[:2], self._value_heads, self._value_size)
        if self._ordered:
            z = module.in_proj_z(hidden).view(shape)
            return module.in_proj_qkv(hidden), z, module.in_proj_b(hidden), module.in_proj_a(hidden)
        found = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        mixed = torch.cat([part.flatten(2) for part in found[:3]], 2)
        z, b, a = (part.contiguous() for part in found[3:])
        return mixed, z.view(shape), b, a

    def _convolve(self, mixed: Tensor, state: Tensor, single: bool) -> Tensor:
        sequences, tokens, channels = mixed.shape
        out = torch.empty_like(mixed)
        _convolve[(sequences * tokens, triton.cdiv(channels, CHANNELS))](
            mixed,
            state,
            self._weight,
            out,
            tokens,
            C=channels,
            WIDTH=self._weight.shape[1],
            STATE=state.shape[-1],
            BLOCK_C=CHANNELS,
            SINGLE=single,
            num_warps=1,
        )
        if not single:
            size = state.shape[-1]
            state.copy_(torch.cat((state, mixed[:, -size:].transpose(1, 2).to(state.dtype)), 2)[..., -size:])
        return out

    def _decode(self, qkv: Tensor, a: Tensor, b: Tensor, states: Tensor, out: Tensor) -> None:
        columns = min(VALUES, self._value_size) if len(qkv) <= FEW_ROWS else self._value_size
        _decay_and_write[(len(qkv), self._value_heads, self._value_size // columns)](
            qkv, a, b, *self._rates, states, out, self._key_size**-0.5, **self._heads, BV=columns, num_warps=4
        )

    def _prefill(self, qkv: Tensor, a: Tensor, b: Tensor, states: Tensor, out: Tensor) -> None:
        tokens, heads, columns = qkv.shape[1], self._value_heads, min(VALUES, self._value_size)
        blocks, scale = triton.cdiv(tokens, BLOCK), self._key_size**-0.5
        new = {"dtype": torch.float32, "device": qkv.device}
        between = (
            torch.empty(tokens, heads, **new),
            torch.empty(tokens, heads, self._key_size, **new),
            torch.empty(tokens, heads, self._value_size, **new),
            torch.empty(blocks, heads, BLOCK, BLOCK, **new),
        )
        _solve_blocks[(blocks, heads)](
            qkv,
            a,
            b,
            *self._rates,
            *between,
            tokens,
            scale,
            **self._heads,
            BT=BLOCK,
            num_warps=4,
            num_stages=1,
        )
        _scan_blocks[(heads, self._value_size // columns)](
            qkv,
            *between,
            states,
            out,
            tokens,
            scale,
            **self._heads,
            BV=columns,
            BT=BLOCK,
            num_warps=4,
            num_stages=self._stages,
        )

    def check(self) -> None:
        """Raises UnsupportedModel unless it gives what the module's own code gives."""
        generator, tokens = torch.Generator().manual_seed(1), sum(PROBE_TOKENS)
        hidden = torch.randn(1, tokens, self._module.hidden_size, generator=generator).to(self._weight)
        expected = self._module(hidden)
        states = SimpleNamespace(
            conv_states=[hidden.new_zeros(1, *self._weight.shape)],
            recurrent_states=[torch.ones(1, self._value_heads, self._key_size, self._value_size, device=hidden.device)],
            has_previous_state=[False],
        )
        cache, parts = SimpleNamespace(layers={self._index: states}), []
        for part in hidden.split(PROBE_TOKENS, 1):
            parts.append(self(part, cache))
            states.has_previous_state = [True]
        _compare(torch.cat(parts, 1), expected)


class NormLayer:
    """The forward of a module with RMSNorm."""

    def __init__(self, module: Any) -> None:
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        epsilon = getattr(module, "eps", None) if epsilon is None else epsilon
        others = len(list(module.parameters())) != 1 or len(list(module.buffers())) != 0
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float) or others:
            raise UnsupportedModel("a norm of another kind")
        self._module, self._weight, self._epsilon, self._centred = module, weight, epsilon, False

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self._weight, self._epsilon, self._centred)

    def check(self) -> None:
        """As of GatedDeltaLayer. Finds out what the weights mean."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(3, len(self._weight), generator=generator).to(self._weight)
        expected = self._module(x)
        for self._centred in (False, True):
            if torch.allclose(self(x).float(), expected.float(), rtol=MAX_ERROR, atol=1e-6):
                return
        raise UnsupportedModel("a norm of another kind")


def _compare(found: Tensor, expected: Tensor) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error <= MAX_ERROR:
        raise UnsupportedModel(f"the kernels' results differ by {error:.2g} of their size")


class LayerKernels:
    """The layers of a model whose place kernels can take."""

    @torch.inference_mode()
    def __init__(self, model: nn.Module) -> None:
        """Raises UnsupportedModel if there is none with the gated delta rule."""
        self._layers = dict(_find_layers(model))
        if not any(isinstance(layer, GatedDeltaLayer) for layer in self._layers.values()):
            raise UnsupportedModel("no layer has the gated delta rule")

    def attach(self) -> None:
        for module, layer in self._layers.items():
            module.__dict__["forward"] = layer

    def detach(self) -> None:
        for module in self._layers:
            module.__dict__.pop("forward", None)


def _find_layers(model: nn.Module) -> Iterator[tuple[nn.Module, GatedDeltaLayer | NormLayer]]:
    """Layers of other kinds are left as they are. Layers with the gated delta rule are compared once for each kind."""
    compared: dict[tuple[object, ...], bool] = {}
    for module in model.modules():
        name = type(module).__name__
        try:
            if name.endswith("RMSNorm"):
                norm = NormLayer(module)
                norm.check()
                yield module, norm
            elif name.endswith("GatedDeltaNet"):
                layer = GatedDeltaLayer(module)
                kind = (type(module), *(tuple(parameter.shape) for parameter in module.parameters()))
                if kind not in compared:
                    compared[kind] = False
                    layer.check()
                    compared[kind] = True
                if compared[kind]:
                    yield module, layer
        except UnsupportedModel as error:
            _log.info("The library computes %s: %s", name, error)
