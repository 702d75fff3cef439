"""Triton kernels for draws that the likeliest tokens of a row don't decide: filters that keep many tokens, and those
that need sums over all of them.

A filter keeps the tokens within limits: of the score (top_k, top_p, min_p, top_a, XTC) or of the distance from the
expected information (typical_p). Each pass over the vocabulary brings a row a stage further: it measures what the next
limit depends on, and the next pass begins with computing that limit from the measure. A limit at which the tokens reach
a count or a probability is found by three passes, each of which measures 1,024 intervals of the last one's interval.

Sums are of integers, so they don't depend on the order in which blocks are added. The passes of rows that are done, and
of those that are decided already, end at once."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from palaver.engines.torch.device_filters import REPORTED, STATUS, UNDECIDED, WIDTH

BINS = 1024
SUMS = BINS + 8
"""What a pass measures: the intervals, or total, total information, count, lowest and highest key."""
ONE = tl.constexpr(float(1 << 44))
"""The likeliest token's weight as an integer: the sum of a whole vocabulary has room in 64 bits."""
KEY = tl.constexpr(float(1 << 22))
"""Keys are distances as integers: from the greatest score, or from the expected information. A unit is less than the
distance between two neighbouring float32 numbers from 4 on."""
MAX_KEY = tl.constexpr((1 << 30) - 1)
"""Beyond it, at a distance of 256, tokens are kept or removed together."""

# The stages of a row, in the order of the filters.
TOP_K = tl.constexpr(1)
INFORMATION = tl.constexpr(2)
TYPICAL_P = tl.constexpr(3)
TOP_P = tl.constexpr(4)
MIN_P = tl.constexpr(5)
TOP_A = tl.constexpr(6)
XTC = tl.constexpr(7)
CHOICES = tl.constexpr(8)
TEMPERATURE = tl.constexpr(9)
DRAW = tl.constexpr(10)
DONE = tl.constexpr(11)

# Columns of a row's settings: see `sampling_kernels`.
SETTING_TOP_K = tl.constexpr(1)
SETTING_TOP_P = tl.constexpr(2)
SETTING_MIN_P = tl.constexpr(3)
SETTING_UNIFORM = tl.constexpr(4)
SETTING_TYPICAL_P = tl.constexpr(7)
SETTING_TOP_A = tl.constexpr(8)
SETTING_XTC_PROBABILITY = tl.constexpr(9)
SETTING_XTC_THRESHOLD = tl.constexpr(10)
SETTING_XTC_UNIFORM = tl.constexpr(11)
SETTING_LOWEST = tl.constexpr(12)
SETTING_HIGHEST = tl.constexpr(13)
SETTING_EXPONENT = tl.constexpr(14)
SETTING_REPETITION = tl.constexpr(15)
SETTING_PRESENCE = tl.constexpr(16)
SETTING_FREQUENCY = tl.constexpr(17)
SETTING_COUNTS = tl.constexpr(18)
SETTING_BIAS = tl.constexpr(19)

STATE = 12
"""Numbers of a row's state, in float64: its stage, its limits, and the interval that is searched (its first key, the
bits of its steps, what is below it, what is to be reached)."""


@triton.jit
def _load_limits(state):
    """The limits of keys: of the score from `first` to `last`, of the information up to `typical`; the least weight;
    the information that is expected; for the draw, the score that has the weight 1, and 1 / temperature."""
    first = tl.load(state + 1).to(tl.int32)
    last = tl.load(state + 2).to(tl.int32)
    typical = tl.load(state + 3).to(tl.int32)
    return first, last, typical, tl.load(state + 4), tl.load(state + 5), tl.load(state + 6), tl.load(state + 7)


@triton.jit
def _next_stage(stage, settings):
    """The next one that the row's settings ask for."""
    xtc = tl.load(settings + SETTING_XTC_UNIFORM) < tl.load(settings + SETTING_XTC_PROBABILITY)
    dynamic = tl.load(settings + SETTING_HIGHEST) > tl.load(settings + SETTING_LOWEST)
    typical = tl.load(settings + SETTING_TYPICAL_P) < 1
    found = tl.where(stage < DRAW, DRAW, DONE)
    found = tl.where((stage < TEMPERATURE) & dynamic, TEMPERATURE, found)
    found = tl.where((stage < CHOICES) & xtc, CHOICES, found)
    found = tl.where((stage < XTC) & xtc, XTC, found)
    found = tl.where((stage < TOP_A) & (tl.load(settings + SETTING_TOP_A) > 0), TOP_A, found)
    found = tl.where((stage < MIN_P) & (tl.load(settings + SETTING_MIN_P) > 0), MIN_P, found)
    found = tl.where((stage < TOP_P) & (tl.load(settings + SETTING_TOP_P) < 1), TOP_P, found)
    found = tl.where((stage < TYPICAL_P) & typical, TYPICAL_P, found)
    found = tl.where((stage < INFORMATION) & typical, INFORMATION, found)
    return tl.where((stage < TOP_K) & (tl.load(settings + SETTING_TOP_K) > 0), TOP_K, found)


@triton.jit
def _weigh(x, inverse, row_top, expected):
    """Of scores: their keys, their weights relative to the row's greatest score, the logarithms of these, and the keys
    of their information."""
    logs = (x.to(tl.float64) - row_top) * inverse
    return _key(row_top - x.to(tl.float64)), tl.exp(logs), logs, _key(tl.abs(expected - logs))


@triton.jit
def _is_kept(x, inverse, row_top, first, last, typical, least, expected):
    keys, weights, _, distances = _weigh(x, inverse, row_top, expected)
    return (weights > 0) & (keys >= first) & (keys <= last) & (distances <= typical) & (weights >= least)


@triton.jit
def _key(distance):
    return tl.minimum(tl.maximum(distance * KEY, 0.0), MAX_KEY).to(tl.int32)


@triton.jit
def _start_filters(
    results_ptr,
    settings_ptr,
    statistics_ptr,
    state_ptr,
    blocks,
    BLOCKS: tl.constexpr,
    SETTINGS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATUS: tl.constexpr,
    UNDECIDED: tl.constexpr,
    STATE: tl.constexpr,
):
    """The first state of each row: done, unless it is undecided."""
    row = tl.program_id(0)
    settings = settings_ptr + row * SETTINGS
    index = tl.arange(0, BLOCKS)
    tops = tl.load(statistics_ptr + (row * blocks + index) * 3, mask=index < blocks, other=float("-inf"))
    undecided = tl.load(results_ptr + row * WIDTH + STATUS) == UNDECIDED
    stage = tl.where(undecided, _next_stage(tl.full([], 0, tl.int32), settings), DONE)
    here = state_ptr + row * STATE
    tl.store(here, stage.to(tl.float64))
    tl.store(here + 1, 0.0)
    tl.store(here + 2, MAX_KEY + 0.0)
    tl.store(here + 3, MAX_KEY + 0.0)
    tl.store(here + 4, 0.0)
    tl.store(here + 5, 0.0)
    tl.store(here + 6, tl.max(tops, 0).to(tl.float64))
    tl.store(here + 7, tl.load(settings))
    tl.store(here + 8, 0.0)
    tl.store(here + 9, 20.0)
    tl.store(here + 10, 0.0)
    tl.store(here + 11, 0.0)


@triton.jit(do_not_specialize=["size", "blocks", "rows", "number"])
def _filter_pass(
    scores_ptr,
    settings_ptr,
    state_ptr,
    sums_ptr,
    masses_ptr,
    size,
    blocks,
    rows,
    number,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    SUMS: tl.constexpr,
    SETTINGS: tl.constexpr,
    STATE: tl.constexpr,
):
    """Pass `number`, from 1 on: computes the row's next state from the last one and its sums, then measures a block."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    settings = settings_ptr + row * SETTINGS
    before = state_ptr + ((number - 1) * rows + row) * STATE
    stage = tl.load(before).to(tl.int32)
    first, last, typical, least, expected, top, inverse = _load_limits(before)
    start = tl.load(before + 8).to(tl.int32)
    shift = tl.load(before + 9).to(tl.int32)
    below = tl.load(before + 10)
    target = tl.load(before + 11)
    row_top = tl.load(state_ptr + row * STATE + 6)
    if number > 1:
        sums = sums_ptr + ((number - 1) * rows + row) * SUMS
        bins = tl.arange(0, BINS)
        if (stage == TOP_K) | (stage == TYPICAL_P) | (stage == TOP_P):
            measured = tl.load(sums + bins).to(tl.float64)
            if stage == TOP_K:
                target = tl.load(settings + SETTING_TOP_K)
            elif (stage == TOP_P) & (shift == 20):
                target = tl.load(settings + SETTING_TOP_P) * tl.sum(measured, 0)
            reached = below + tl.cumsum(measured, 0)
            at = tl.minimum(tl.sum((reached < target).to(tl.int32), 0), BINS - 1)
            below += tl.sum(tl.where(bins < at, measured, 0.0), 0)
            start += at << shift
            if shift == 0:
                if stage == TYPICAL_P:
                    typical = start
                else:
                    last = tl.minimum(last, start)
                stage = _next_stage(stage, settings)
                start = start * 0
                shift = shift * 0 + 20
                below = below * 0
            else:
                shift -= 10
        elif stage < DRAW:
            total = tl.load(sums + BINS).to(tl.float64)
            information = tl.load(sums + BINS + 1).to(tl.float64)
            count = tl.load(sums + BINS + 2).to(tl.float64)
            lowest = (-tl.load(sums + BINS + 3) + MAX_KEY).to(tl.int32)
            highest = tl.load(sums + BINS + 4).to(tl.int32)
            greatest = tl.load(sums + BINS + 5).to(tl.float64) / ONE
            if stage == INFORMATION:
                expected = information / total
                target = tl.load(settings + SETTING_TYPICAL_P) * total
            elif stage == MIN_P:
                least = tl.maximum(least, tl.load(settings + SETTING_MIN_P) * greatest)
            elif stage == TOP_A:
                least = tl.maximum(least, tl.load(settings + SETTING_TOP_A) * greatest * greatest / (total / ONE))
            elif stage == XTC:
                target = tl.load(settings + SETTING_XTC_THRESHOLD) * (total / ONE)
            elif stage == CHOICES:
                first = tl.where(count > 1, highest, first)
            else:
                entropy = tl.log(total / ONE) - information / total
                evenness = tl.minimum(tl.maximum(entropy / tl.log(tl.maximum(count, 2.0)), 0.0), 1.0)
                exponent = tl.load(settings + SETTING_EXPONENT)
                power = tl.where(evenness > 0, tl.exp(exponent * tl.log(tl.maximum(evenness, 1e-300))), 0.0)
                power = tl.where(exponent == 0, 1.0, power)
                coldest = tl.load(settings + SETTING_LOWEST)
                temperature = coldest + (tl.load(settings + SETTING_HIGHEST) - coldest) * power
                several = count > 1
                last = tl.where(several & (temperature <= 0), lowest, last)
                top = tl.where(several, row_top - lowest.to(tl.float64) / KEY, top)
                inverse = tl.where(several & (temperature > 0), 1 / tl.maximum(temperature, 1e-300), inverse)
            stage = _next_stage(stage, settings)
        elif stage == DRAW:
            stage = stage * 0 + DONE
    if block == 0:
        here = state_ptr + (number * rows + row) * STATE
        tl.store(here, stage.to(tl.float64))
        tl.store(here + 1, first.to(tl.float64))
        tl.store(here + 2, last.to(tl.float64))
        tl.store(here + 3, typical.to(tl.float64))
        tl.store(here + 4, least)
        tl.store(here + 5, expected)
        tl.store(here + 6, top)
        tl.store(here + 7, inverse)
        tl.store(here + 8, start.to(tl.float64))
        tl.store(here + 9, shift.to(tl.float64))
        tl.store(here + 10, below)
        tl.store(here + 11, target)
    if stage < DONE:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + row.to(tl.int64) * size + ids, mask=ids < size, other=float("-inf"))
        weighed_by = tl.load(settings)
        keys, weights, logs, distances = _weigh(x, weighed_by, row_top, expected)
        kept = _is_kept(x, weighed_by, row_top, first, last, typical, least, expected)
        sums = sums_ptr + (number * rows + row) * SUMS
        if stage == DRAW:
            drawn = tl.exp((x.to(tl.float64) - top) * inverse)
            tl.store(masses_ptr + row * blocks + block, tl.sum(tl.where(kept, drawn, 0.0), 0))
        elif (stage == TOP_K) | (stage == TYPICAL_P) | (stage == TOP_P):
            searched = tl.where(stage == TYPICAL_P, distances, keys) - start
            inside = kept & (searched >= 0) & ((searched >> shift) < BINS)
            amount = tl.where(stage == TOP_K, 1.0, weights * ONE + 0.5).to(tl.int64)
            tl.atomic_add(sums + (searched >> shift), amount, mask=inside, sem="relaxed")
        else:
            kept = kept & ((stage != CHOICES) | (weights >= target))
            mine = tl.where(kept, weights, 0.0)
            logs = tl.where(kept, logs, 0.0)
            count = tl.sum(kept.to(tl.int64), 0)
            if count > 0:
                tl.atomic_add(sums + BINS, (tl.sum(mine, 0) * ONE).to(tl.int64), sem="relaxed")
                tl.atomic_add(sums + BINS + 1, (tl.sum(mine * logs, 0) * ONE).to(tl.int64), sem="relaxed")
                tl.atomic_add(sums + BINS + 2, count, sem="relaxed")
                nearest = tl.min(tl.where(kept, keys, MAX_KEY), 0).to(tl.int64)
                tl.atomic_max(sums + BINS + 3, -nearest + MAX_KEY, sem="relaxed")
                tl.atomic_max(sums + BINS + 4, tl.max(tl.where(kept, keys, 0), 0).to(tl.int64), sem="relaxed")
                tl.atomic_max(sums + BINS + 5, (tl.max(mine, 0) * ONE).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["size", "blocks", "rows", "number"])
def _draw_filtered(
    logits_ptr,
    scores_ptr,
    settings_ptr,
    state_ptr,
    masses_ptr,
    results_ptr,
    size,
    blocks,
    rows,
    number,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LISTED: tl.constexpr,
    REPORTED: tl.constexpr,
    SETTINGS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATUS: tl.constexpr,
    UNDECIDED: tl.constexpr,
    STATE: tl.constexpr,
):
    """Draws the tokens of undecided rows by the limits after pass `number`, and completes their results."""
    row = tl.program_id(0)
    out = results_ptr + row * WIDTH
    if tl.load(out + STATUS) == UNDECIDED:
        settings = settings_ptr + row * SETTINGS
        weighed_by = tl.load(settings)
        row_top = tl.load(state_ptr + row * STATE + 6)
        here = state_ptr + (number * rows + row) * STATE
        first, last, typical, least, expected, top, inverse = _load_limits(here)
        index = tl.arange(0, BLOCKS)
        masses = tl.load(masses_ptr + row * blocks + index, mask=index < blocks, other=0.0)
        mass = tl.sum(masses, 0)
        uniform = tl.load(settings + SETTING_UNIFORM)
        block = tl.sum((tl.cumsum(masses, 0) <= uniform * mass).to(tl.int32), 0)
        highest = tl.max(tl.where(masses > 0, index, 0), 0)
        block = tl.minimum(block, highest)
        rest = uniform * mass - tl.sum(tl.where(index < block, masses, 0.0), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + row.to(tl.int64) * size + ids, mask=ids < size, other=float("-inf"))
        kept = _is_kept(x, weighed_by, row_top, first, last, typical, least, expected)
        shares = tl.where(kept, tl.exp((x.to(tl.float64) - top) * inverse), 0.0)
        token = tl.min(tl.where((tl.cumsum(shares, 0) > rest) & kept, ids, 0x7FFFFFFF), 0)
        token = tl.minimum(token, tl.max(tl.where(kept, ids, 0), 0))  # by rounding at the block's end
        token = tl.maximum(0, tl.minimum(token, size - 1))
        norm = tl.log(mass)
        at = row.to(tl.int64) * size + token
        tl.store(out, token.to(tl.float64))
        tl.store(out + 1, tl.load(logits_ptr + at).to(tl.float64) - tl.load(out + WIDTH - 1))
        tl.store(out + 2, (tl.load(scores_ptr + at).to(tl.float64) - top) * inverse - norm)
        tl.store(out + STATUS, 0.0)
        rank = tl.arange(0, LISTED)
        listed = rank < REPORTED
        own = tl.load(out + 4 + 2 * REPORTED + rank, mask=listed, other=0.0).to(tl.int32)
        valid = listed & (own < size)
        x = tl.load(scores_ptr + row.to(tl.int64) * size + own, mask=valid, other=float("-inf"))
        kept = _is_kept(x, weighed_by, row_top, first, last, typical, least, expected)
        after = tl.where(kept, (x.to(tl.float64) - top) * inverse - norm, float("-inf"))
        tl.store(out + 4 + 3 * REPORTED + rank, after, mask=listed)


def draw_undecided(
    logits: Tensor, scores: Tensor, settings: Tensor, statistics: Tensor, results: Tensor, passes: int
) -> None:
    """Completes the undecided rows of the results. `statistics`: of each block of the scores, its maximum first.
    `passes`: as many as the settings of any row need."""
    rows, size = scores.shape
    blocks = statistics.shape[1]
    block, padded_blocks = triton.next_power_of_2(-(-size // blocks)), triton.next_power_of_2(blocks)
    device = scores.device
    state = torch.empty(passes + 1, rows, STATE, dtype=torch.float64, device=device)
    sums = torch.zeros(passes + 1, rows, SUMS, dtype=torch.int64, device=device)
    masses = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    common = {"SETTINGS": settings.shape[1], "STATE": STATE}
    status = {"WIDTH": WIDTH, "STATUS": STATUS, "UNDECIDED": UNDECIDED}
    _start_filters[(rows,)](
        results, settings, statistics, state, blocks, BLOCKS=padded_blocks, **status, **common, num_warps=4
    )
    for number in range(1, passes + 1):
        _filter_pass[(rows, blocks)](
            scores,
            settings,
            state,
            sums,
            masses,
            size,
            blocks,
            rows,
            number,
            BLOCK=block,
            BINS=BINS,
            SUMS=SUMS,
            **common,
            num_warps=4,
        )
    _draw_filtered[(rows,)](
        logits,
        scores,
        settings,
        state,
        masses,
        results,
        size,
        blocks,
        rows,
        passes,
        BLOCK=block,
        BLOCKS=padded_blocks,
        LISTED=triton.next_power_of_2(REPORTED),
        REPORTED=REPORTED,
        **status,
        **common,
        num_warps=8,
    )
