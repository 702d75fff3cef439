"""A reply's tokens as bytes: ids, log-probabilities and the five likeliest alternatives of each.

Log-probabilities are kept as 32-bit floats. `as_stored` gives a step as it will be read back, so that what is
published before a crash and after it is the same."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice

from palaver.generation import Alternative, Step
from palaver.store.errors import Damaged

ALTERNATIVES = 5
NOT_DRAWN = float("nan")
"""The log-probability of a token that nobody drew: the words an edited reply goes on from."""

_HEADER = struct.Struct("<BBI")
_PLAIN, _PACKED = 1, 2
_SMALL = 256
"""Fewer bytes than this are not worth compressing."""
_LOWEST = -3e38


def given_tokens(ids: Iterable[int]) -> tuple[Step, ...]:
    """Tokens that were not generated."""
    return tuple(Step(id, NOT_DRAWN) for id in ids)


def as_stored(step: Step) -> Step:
    return unpack_tokens(pack_tokens((step,)))[0]


def pack_tokens(steps: Sequence[Step]) -> bytes:
    """Columns, one after another: ids, log-probabilities, how many alternatives, their ids, their log-probabilities;
    then the same without ids for what was drawn, where that is known of any token."""
    drawn = any(step.drawn_logprob is not None or step.drawn_from for step in steps)
    ids = struct.pack(f"<{len(steps)}i", *[step.token_id for step in steps])
    body = ids + _column([step.logprob for step in steps], [step.alternatives for step in steps])
    if drawn:
        logprobs = [NOT_DRAWN if step.drawn_logprob is None else step.drawn_logprob for step in steps]
        body += _column(logprobs, [step.drawn_from for step in steps])
    kind = _PLAIN if len(body) < _SMALL else _PACKED
    return _HEADER.pack(kind, drawn, len(steps)) + (body if kind == _PLAIN else zlib.compress(body, 1))


def unpack_tokens(data: bytes) -> tuple[Step, ...]:
    """Damaged where the bytes are not what `pack` made."""
    try:
        kind, drawn, count = _HEADER.unpack_from(data)
        body = data[_HEADER.size :] if kind == _PLAIN else zlib.decompress(data[_HEADER.size :])
        ids = struct.unpack_from(f"<{count}i", body)
        logprobs, alternatives, at = _uncolumn(body, 4 * count, count)
        if not drawn:
            return tuple(map(Step, ids, logprobs, alternatives))
        drawn_logprobs, drawn_from, _ = _uncolumn(body, at, count)
        known = [None if number != number else number for number in drawn_logprobs]
        return tuple(map(Step, ids, logprobs, alternatives, known, drawn_from))
    except (struct.error, zlib.error) as error:
        raise Damaged(f"The tokens of a reply can't be read ({error}): restore a backup.") from error


def _column(logprobs: list[float], alternatives: list[tuple[Alternative, ...]]) -> bytes:
    kept = [row[:ALTERNATIVES] for row in alternatives]
    flat = [one for row in kept for one in row]
    layout = f"<{len(kept)}f{len(kept)}B{len(flat)}i{len(flat)}f"
    counts = [len(row) for row in kept]
    ids = [one.token_id for one in flat]
    numbers = [one.logprob for one in flat]
    try:
        return struct.pack(layout, *logprobs, *counts, *ids, *numbers)
    except OverflowError:  # a number that only a 64-bit float can hold
        return struct.pack(layout, *_bounded(logprobs), *counts, *ids, *_bounded(numbers))


def _uncolumn(body: bytes, at: int, count: int) -> tuple[tuple[float, ...], list[tuple[Alternative, ...]], int]:
    """The log-probabilities, the alternatives, and where the column ends."""
    logprobs = struct.unpack_from(f"<{count}f", body, at)
    counts = struct.unpack_from(f"<{count}B", body, at + 4 * count)
    at, total = at + 5 * count, sum(counts)
    numbers = struct.unpack_from(f"<{total}i{total}f", body, at)
    flat = map(Alternative, numbers[:total], numbers[total:])
    return logprobs, [tuple(islice(flat, number)) for number in counts], at + 8 * total


def _bounded(numbers: list[float]) -> list[float]:
    return [min(max(number, _LOWEST), -_LOWEST) for number in numbers]
