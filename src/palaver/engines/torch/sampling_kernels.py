"""Triton kernels that sample a batch on a CUDA device: three launches, and one small row of results for each request.

The vocabulary is cut into blocks. The first kernel computes for each block its maximum and its sums of exponentials.
The second one sorts the blocks that hold the likeliest tokens. The third one joins the blocks of a row and draws by
inverse transform in vocabulary order. All sums have a fixed order, so the same logits give the same token. A kernel
before them applies penalties, biases and masks; `filter_kernels` draws where the likeliest tokens don't decide.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from palaver.engines.core.sampler import has_rare_filter
from palaver.engines.torch.device_filters import REPORTED, WIDTH
from palaver.engines.torch.filter_kernels import (
    SETTING_BIAS,
    SETTING_COUNTS,
    SETTING_FREQUENCY,
    SETTING_PRESENCE,
    SETTING_REPETITION,
    draw_undecided,
)
from palaver.sampling import Sampling

BLOCK = 1024
KEEP = 32
"""The likeliest tokens of a row that are sorted."""
MAX_TOP_K = KEEP - 1
"""One more token is needed to tell whether there is a tie at the threshold."""
SETTINGS, BASIC_SETTINGS = 20, 7
"""Numbers of a row of settings: see `row_settings`. Where there are neither changes nor filters, the first suffice."""
UNIFORM, FORCED, XTC_UNIFORM, PENALTIES, COUNTS, BIAS = 4, 5, 11, 15, 18, 19
"""The settings that change from token to token, the first of the penalties, and those that name rows of tables."""
LOWEST = -(2**63)


@triton.jit
def _keys(x, ids):
    """Integers that sort by value, ties by the lower id."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _key_ids(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _key_values(keys):
    bits = (keys >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _block_statistics(
    scores_ptr,
    settings_ptr,
    statistics_ptr,
    best_ptr,
    size,
    blocks,
    BLOCK: tl.constexpr,
    SETTINGS: tl.constexpr,
):
    """Of each block: its maximum, its sums of exponentials (plain, and at the row's temperature), its best key."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inverse = tl.load(settings_ptr + row * SETTINGS).to(tl.float32)
    x = tl.load(scores_ptr + row.to(tl.int64) * size + ids, mask=ids < size, other=float("-inf"))
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    here = statistics_ptr + (row * blocks + block) * 3
    tl.store(here, top)
    tl.store(here + 1, tl.sum(tl.exp(x - base), 0))
    tl.store(here + 2, tl.sum(tl.exp((x - base) * inverse), 0))
    tl.store(best_ptr + row * blocks + block, tl.max(_keys(x, ids), 0))


@triton.jit
def _sort_best_blocks(
    scores_ptr,
    best_ptr,
    keys_ptr,
    size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEEP: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """The likeliest tokens are in the blocks with the greatest maxima: program (row, j) sorts the j-th of these."""
    row = tl.program_id(0)
    j = tl.program_id(1)
    index = tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + row * blocks + index, mask=index < blocks, other=LOWEST)
    mine = tl.max(tl.where(tl.arange(0, KEEP) == j, tl.topk(best, KEEP), LOWEST), 0)
    ids = (_key_ids(mine) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    found = (ids < size) & (mine != LOWEST)
    x = tl.load(scores_ptr + row.to(tl.int64) * size + ids, mask=found, other=float("-inf"))
    keys = tl.where(found, _keys(x, ids), LOWEST)
    tl.store(keys_ptr + (row * KEEP + j) * KEEP + tl.arange(0, KEEP), tl.topk(keys, KEEP))


@triton.jit
def _log_sum(statistics_ptr, index, blocks, column, base, inverse):
    """The logarithm of a row's sum of exponentials, relative to `base`."""
    top = tl.load(statistics_ptr + index * 3, mask=index < blocks, other=float("-inf"))
    sums = tl.load(statistics_ptr + index * 3 + column, mask=index < blocks, other=0.0)
    return tl.log(tl.sum(sums * tl.exp((top - base) * inverse), 0))


@triton.jit
def _draw(
    logits_ptr,
    scores_ptr,
    settings_ptr,
    raw_statistics_ptr,
    raw_keys_ptr,
    statistics_ptr,
    keys_ptr,
    results_ptr,
    size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEEP: tl.constexpr,
    REPORTED: tl.constexpr,
    SETTINGS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNCHANGED: tl.constexpr,
):
    """Joins the blocks of one row and draws its token. `raw` is of the logits, the rest of the scores. UNCHANGED: both
    are the same."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCKS)
    rank = tl.arange(0, KEEP)
    infinity = float("inf")
    mine = settings_ptr + row * SETTINGS
    inverse = tl.load(mine).to(tl.float32)
    top_k = tl.load(mine + 1).to(tl.int32)
    top_p = tl.load(mine + 2)
    min_p = tl.load(mine + 3).to(tl.float32)
    uniform = tl.load(mine + 4)
    forced = tl.load(mine + 5).to(tl.int32)
    rare = tl.load(mine + 6) > 0

    raw = tl.topk(tl.load(raw_keys_ptr + row * KEEP * KEEP + tl.arange(0, KEEP * KEEP)), KEEP)
    raw_ids = _key_ids(raw)
    raw_values = _key_values(raw)
    raw_top = tl.max(raw_values, 0)
    raw_norm = raw_top + _log_sum(raw_statistics_ptr + row * blocks * 3, index, blocks, 1, raw_top, 1.0)

    best = raw
    if not UNCHANGED:
        best = tl.topk(tl.load(keys_ptr + row * KEEP * KEEP + tl.arange(0, KEEP * KEEP)), KEEP)
    ids = _key_ids(best)
    values = _key_values(best)
    top = tl.max(values, 0)
    none_left = top == -infinity
    top = tl.where(none_left, 0.0, top)
    own = statistics_ptr + row * blocks * 3
    tops = tl.load(own + index * 3, mask=index < blocks, other=-infinity)
    sums = tl.load(own + index * 3 + 2, mask=index < blocks, other=0.0)
    masses = tl.where(index < blocks, sums * tl.exp((tops - top) * inverse), 0.0).to(tl.float64)
    masses = tl.where(tops == -infinity, 0.0, masses)
    mass = tl.sum(masses, 0)

    undecided = rare
    lowest = tl.full([], float("-inf"), tl.float32)
    if inverse == 0:
        token = tl.min(tl.where(rank == 0, ids, 0x7FFFFFFF), 0)
        norm = _log_sum(own, index, blocks, 1, top, 1.0)
        after = values - top - norm
        inverse = tl.full([], 1.0, tl.float32)
    elif (top_k > 0) | (top_p < 1) | (min_p > 0):
        # tokens as likely as the last one that top_k keeps are kept too
        limit = tl.where(top_k > 0, top_k, KEEP)
        limit_value = tl.min(tl.where(rank < limit, values, infinity), 0)
        sorted_to = tl.min(values, 0)
        undecided = rare | ((top_k > 0) & (sorted_to == limit_value) & (limit_value > -infinity))
        weights = tl.where(values >= limit_value, tl.exp((values - top) * inverse), 0.0)
        last = tl.exp((sorted_to - top) * inverse)
        total = tl.where(top_k > 0, tl.sum(weights.to(tl.float64), 0), mass)
        wide = weights.to(tl.float64)
        if top_p < 1:
            kept = tl.cumsum(wide, 0) - wide < top_p * total
            threshold = tl.min(tl.where(kept & (weights > 0), weights, infinity), 0)
            undecided = undecided | ((top_k == 0) & ((tl.sum(wide, 0) < top_p * total) | (threshold == last)))
            weights = tl.where(weights >= threshold, weights, 0.0)
        elif top_k == 0:
            undecided = undecided | (last >= min_p)
        weights = tl.where(weights >= min_p, weights, 0.0)
        wide = weights.to(tl.float64)
        total = tl.sum(wide, 0)
        reached = tl.sum(tl.where(ids[None, :] <= ids[:, None], wide[None, :], 0.0), 1) > uniform * total
        token = tl.min(tl.where(reached & (weights > 0), ids, 0x7FFFFFFF), 0)
        token = tl.minimum(token, tl.max(tl.where(weights > 0, ids, 0), 0))
        norm = tl.log(total).to(tl.float32)
        after = tl.where(weights > 0, (values - top) * inverse - norm, -infinity)
        lowest = tl.min(tl.where(weights > 0, values, infinity), 0)
    else:
        block = tl.minimum(tl.sum((tl.cumsum(masses, 0) <= uniform * mass).to(tl.int32), 0), blocks - 1)
        rest = uniform * mass - tl.sum(tl.where(index < block, masses, 0.0), 0)
        here = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + row.to(tl.int64) * size + here, mask=here < size, other=-infinity)
        shares = tl.exp((x - top) * inverse)
        token = tl.min(tl.where((tl.cumsum(shares.to(tl.float64), 0) > rest) & (shares > 0), here, 0x7FFFFFFF), 0)
        token = tl.minimum(token, tl.max(tl.where(shares > 0, here, 0), 0))  # by rounding at the block's end
        norm = tl.log(mass).to(tl.float32)
        after = (values - top) * inverse - norm

    token = tl.where(forced >= 0, forced, token)
    token = tl.maximum(0, tl.minimum(token, size - 1))  # a row of NaNs has none
    at = row.to(tl.int64) * size + token
    score = tl.load(scores_ptr + at)
    drawn = tl.where(score >= lowest, (score - top) * inverse - norm, -infinity)
    status = tl.where((none_left | (score == -infinity)) & (forced < 0), 2, tl.where(undecided, 1, 0))
    out = results_ptr + row * WIDTH
    tl.store(out, token.to(tl.float64))
    tl.store(out + 1, (tl.load(logits_ptr + at) - raw_norm).to(tl.float64))
    tl.store(out + 2, drawn.to(tl.float64))
    tl.store(out + 3, status.to(tl.float64))
    tl.store(out + WIDTH - 1, raw_norm.to(tl.float64))
    reported = rank < REPORTED
    tl.store(out + 4 + rank, raw_ids.to(tl.float64), mask=reported)
    tl.store(out + 4 + REPORTED + rank, (raw_values - raw_norm).to(tl.float64), mask=reported)
    tl.store(out + 4 + 2 * REPORTED + rank, ids.to(tl.float64), mask=reported)
    tl.store(out + 4 + 3 * REPORTED + rank, after.to(tl.float64), mask=reported)


@triton.jit(do_not_specialize=["size", "vocabulary", "mask_bytes"])
def _change_scores(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    bias_ptr,
    masked_ptr,
    masks_ptr,
    edits_ptr,
    edited_ptr,
    edit_values_ptr,
    scores_ptr,
    size,
    vocabulary,
    mask_bytes,
    BLOCK: tl.constexpr,
    SETTINGS: tl.constexpr,
    EDITS: tl.constexpr,
):
    """The scores of each row after penalties, edits of single tokens, biases and masks: as `LogitsChanges` computes
    them.

    A row of counts holds twice the number of times that each token is in the reply, and 1 more if it is in the context.
    `edits`: of each row, how many edits it has; an edit adds a value to a token's score or, for ids that are negative
    (-1 - id), makes it less likely by a factor. `masked`: of each row, its row of masks, or -1. A mask has a bit for
    each token that is allowed."""
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    known = ids < vocabulary
    settings = settings_ptr + row * SETTINGS
    x = tl.load(logits_ptr + row.to(tl.int64) * size + ids, mask=inside, other=float("-inf"))
    slot = tl.load(settings + SETTING_COUNTS).to(tl.int64)
    if slot >= 0:
        counts = tl.load(counts_ptr + slot * vocabulary + ids, mask=known, other=0)
        presence = tl.load(settings + SETTING_PRESENCE).to(tl.float32)
        frequency = tl.load(settings + SETTING_FREQUENCY).to(tl.float32)
        x = tl.where(counts > 0, _penalised(x, tl.load(settings + SETTING_REPETITION).to(tl.float32)), x)
        x = tl.where(counts > 1, x - presence, x)
        x = x - frequency * (counts >> 1).to(tl.float32)
    for edit in range(tl.load(edits_ptr + row).to(tl.int32)):
        token = tl.load(edited_ptr + row * EDITS + edit)
        value = tl.load(edit_values_ptr + row * EDITS + edit)
        x = tl.where(ids == token, x + value, x)
        x = tl.where(ids == -1 - token, _penalised(x, value), x)
    slot = tl.load(settings + SETTING_BIAS).to(tl.int64)
    if slot >= 0:
        x += tl.load(bias_ptr + slot * vocabulary + ids, mask=known, other=0.0)
    slot = tl.load(masked_ptr + row)
    if slot >= 0:
        allowed = tl.load(masks_ptr + slot * mask_bytes + ids // 8, mask=known, other=0).to(tl.int32)
        x = tl.where((allowed >> (ids % 8)) & 1 == 1, x, float("-inf"))
    tl.store(scores_ptr + row.to(tl.int64) * size + ids, x, mask=inside)


@triton.jit
def _penalised(x, penalty):
    """Less likely by the factor `penalty`, whatever the sign of the score."""
    factor = penalty + tl.zeros_like(x)
    return tl.where(x > 0, tl.div_rn(x, factor), x * factor)


@triton.jit(do_not_specialize=["vocabulary"])
def _count_tokens(slot_ptr, token_ptr, counts_ptr, vocabulary):
    """Adds a token to the counts of each row that has one."""
    row = tl.program_id(0)
    token = tl.load(token_ptr + row)
    if token >= 0:
        at = counts_ptr + tl.load(slot_ptr + row) * vocabulary + token
        tl.store(at, tl.load(at) + 2)


class ScoreChanges(NamedTuple):
    """What changes in the logits of a batch, on the device."""

    vocabulary_size: int
    settings: Tensor
    counts: Tensor
    """By row of the table and token id."""
    biases: Tensor
    count_slots: Tensor
    count_ids: Tensor
    """Of each row, a token that is added to its counts first, or -1."""
    edits: Tensor
    edited_ids: Tensor
    edit_values: Tensor
    masked: Tensor
    masks: Tensor


def row_settings(sampling: Sampling, uniform: float = 0.0, xtc_uniform: float = 1.0) -> tuple[float, ...]:
    """1 / temperature (0: greedy), top_k, top_p, min_p, the uniform number, the forced token id or -1; whether the
    likeliest tokens alone can't decide; typical_p, top_a, XTC's probability, threshold and uniform number; the lowest
    and highest dynamic temperature and its exponent; the three penalties; the rows of counts and of biases, or -1."""
    rest = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, -1, -1)
    if sampling.temperature == 0:
        return (0, 0, 1, 0, 0, -1, 0, 1, 0, 0, 0, 1, 1, 1, 1, *rest)
    return (
        1 / sampling.filter_temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        uniform,
        -1,
        always_needs_filters(sampling),
        sampling.typical_p,
        sampling.top_a,
        sampling.xtc_probability,
        sampling.xtc_threshold,
        xtc_uniform,
        sampling.dynamic_temperature(0.0),
        sampling.dynamic_temperature(1.0),
        sampling.dynatemp_exponent,
        *rest,
    )


def filter_passes(sampling: Sampling) -> int:
    """How many passes of `filter_kernels` complete any draw: three for each limit that is searched, one or two for each
    of the others, and one for the draw."""
    typical = 4 * (sampling.typical_p < 1)
    searched = 3 * (sampling.top_k > 0) + 3 * (sampling.top_p < 1) + typical
    others = (sampling.min_p > 0) + (sampling.top_a > 0) + (sampling.dynatemp_range > 0)
    return searched + others + 2 * (sampling.xtc_probability > 0) + 1


def always_needs_filters(sampling: Sampling) -> bool:
    """Whether no draw is decided by the likeliest tokens alone."""
    return sampling.temperature > 0 and (has_rare_filter(sampling) or sampling.top_k > MAX_TOP_K)


def may_need_filters(sampling: Sampling) -> bool:
    """The same of some draw, other than by a tie."""
    wide = sampling.top_k == 0 and (sampling.top_p < 1 or sampling.min_p > 0)
    return always_needs_filters(sampling) or (sampling.temperature > 0 and wide)


def change_scores(logits: Tensor, changes: ScoreChanges) -> Tensor:
    """The scores of each row after its changes, which first count a token of each reply."""
    rows, size = logits.shape
    scores = torch.empty_like(logits)
    size_of_counts = changes.vocabulary_size
    _count_tokens[(rows,)](changes.count_slots, changes.count_ids, changes.counts, size_of_counts, num_warps=1)
    _change_scores[(rows, triton.cdiv(size, BLOCK))](
        logits,
        changes.settings,
        changes.counts,
        changes.biases,
        changes.masked,
        changes.masks,
        changes.edits,
        changes.edited_ids,
        changes.edit_values,
        scores,
        size,
        changes.vocabulary_size,
        changes.masks.shape[1],
        BLOCK=BLOCK,
        SETTINGS=SETTINGS,
        EDITS=changes.edited_ids.shape[1],
        num_warps=4,
        enable_fp_fusion=False,
    )
    return scores


class BlockLists:
    """Of the scores of a batch: the statistics of each block, and the likeliest tokens of the best blocks."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        blocks = triton.cdiv(size, BLOCK)
        self.statistics = torch.empty(rows, blocks, 3, dtype=torch.float32, device=device)
        self.keys = torch.empty(rows, KEEP, KEEP, dtype=torch.int64, device=device)
        self._best = torch.empty(rows, blocks, dtype=torch.int64, device=device)

    def compute(self, scores: Tensor, settings: Tensor) -> None:
        """For the first rows."""
        rows, size = scores.shape
        blocks = self.statistics.shape[1]
        _block_statistics[(rows, blocks)](
            scores,
            settings,
            self.statistics,
            self._best,
            size,
            blocks,
            BLOCK=BLOCK,
            SETTINGS=settings.shape[1],
            num_warps=4,
        )
        _sort_best_blocks[(rows, KEEP)](
            scores,
            self._best,
            self.keys,
            size,
            blocks,
            BLOCK=BLOCK,
            BLOCKS=_padded(blocks),
            KEEP=KEEP,
            LOWEST=LOWEST,
            num_warps=4,
        )


def _padded(blocks: int) -> int:
    return max(KEEP, triton.next_power_of_2(blocks))


def sample_rows(
    logits: Tensor, scores: Tensor, settings: Tensor, raw: BlockLists, own: BlockLists, passes: int = 0
) -> Tensor:
    """A row of results (as in `device_filters`) for each row of float32 scores, in float64 on the same device.

    `settings`: a row of numbers each, in float64. `raw`, `own`: of the logits and of the scores, computed. `passes`: of
    `filter_kernels`, for rows that the likeliest tokens don't decide; 0: these stay undecided."""
    rows, size = logits.shape
    blocks = own.statistics.shape[1]
    results = torch.empty(rows, WIDTH, dtype=torch.float64, device=logits.device)
    _draw[(rows,)](
        logits,
        scores,
        settings,
        raw.statistics,
        raw.keys,
        own.statistics,
        own.keys,
        results,
        size,
        blocks,
        BLOCK=BLOCK,
        BLOCKS=_padded(blocks),
        KEEP=KEEP,
        REPORTED=REPORTED,
        SETTINGS=settings.shape[1],
        WIDTH=WIDTH,
        UNCHANGED=raw is own,
        num_warps=8,
    )
    if passes:
        draw_undecided(logits, scores, settings, own.statistics, results, passes)
    return results
