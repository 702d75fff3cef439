"""Triton kernels around the layers of a step: embeddings and random numbers, the residual, the tables of rows.

A row's bits don't depend on the rows beside it, nor on how a text is cut into passes: each sum has one order, whatever
the shape of the tiles that compute it. `linear_kernels.py` and `attention_kernels.py` say how; all other sums are of
bfloat16 numbers in float64, where they are exact, so that their order doesn't matter.

PDL (programmatic dependent launch): a kernel starts while the one before it ends. What doesn't depend on that one, such
as weights, is fetched before `gdc_wait`, everything else after it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from palaver.engines.torch.kernel_functions import next_power


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
