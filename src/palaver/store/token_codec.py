"""The binary encoding of a reply's tokens: ids, log-probabilities and the five likeliest alternatives of each.

Log-probabilities are stored as 32-bit floats. `as_stored` returns a step as it will be read back, so that events
published before and after a crash are the same."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice

from palaver.generation import Alternative, Step
from palaver.store.errors import Damaged

ALTERNATIVES = 5
NO_LOGPROB = float("nan")
"""The log-probability of a token that was not sampled, such as the prefix of an edited reply."""

_HEADER = struct.Struct("<BBI")
_RAW, _COMPRESSED = 1, 2
_MIN_COMPRESSED = 256
"""Shorter bodies are stored uncompressed."""
_MIN_FLOAT = -3e38


def prefill_steps(ids: Iterable[int]) -> tuple[Step, ...]:
    """Steps for prefilled tokens, which were not sampled."""
    return tuple(Step(id, NO_LOGPROB) for id in ids)


def as_stored(step: Step) -> Step:
    return unpack_tokens(pack_tokens((step,)))[0]


def pack_tokens(steps: Sequence[Step]) -> bytes:
    """Column by column: ids, log-probabilities, number of alternatives, their ids, their log-probabilities.

    If any token has sampling log-probabilities, the same columns without ids follow for those.
    """
    drawn = any(step.drawn_logprob is not None or step.drawn_from for step in steps)
    ids = struct.pack(f"<{len(steps)}i", *[step.token_id for step in steps])
    body = ids + _pack_logprobs([step.logprob for step in steps], [step.alternatives for step in steps])
    if drawn:
        logprobs = [NO_LOGPROB if step.drawn_logprob is None else step.drawn_logprob for step in steps]
        body += _pack_logprobs(logprobs, [step.drawn_from for step in steps])
    kind = _RAW if len(body) < _MIN_COMPRESSED else _COMPRESSED
    return _HEADER.pack(kind, drawn, len(steps)) + (body if kind == _RAW else zlib.compress(body, 1))


def unpack_tokens(data: bytes) -> tuple[Step, ...]:
    """Raises Damaged if the bytes were not written by `pack_tokens`."""
    try:
        kind, drawn, count = _HEADER.unpack_from(data)
        body = data[_HEADER.size :] if kind == _RAW else zlib.decompress(data[_HEADER.size :])
        ids = struct.unpack_from(f"<{count}i", body)
        logprobs, alternatives, offset = _unpack_logprobs(body, 4 * count, count)
        if not drawn:
            return tuple(map(Step, ids, logprobs, alternatives))
        drawn_logprobs, drawn_from, _ = _unpack_logprobs(body, offset, count)
        sampled_logprobs = [None if number != number else number for number in drawn_logprobs]
        return tuple(map(Step, ids, logprobs, alternatives, sampled_logprobs, drawn_from))
    except (struct.error, zlib.error) as error:
        raise Damaged(f"The tokens of a reply can't be read ({error}): restore a backup.") from error


def _pack_logprobs(logprobs: list[float], alternatives: list[tuple[Alternative, ...]]) -> bytes:
    rows = [row[:ALTERNATIVES] for row in alternatives]
    flat = [one for row in rows for one in row]
    layout = f"<{len(rows)}f{len(rows)}B{len(flat)}i{len(flat)}f"
    counts = [len(row) for row in rows]
    ids = [one.token_id for one in flat]
    numbers = [one.logprob for one in flat]
    try:
        return struct.pack(layout, *logprobs, *counts, *ids, *numbers)
    except OverflowError:  # out of range for a 32-bit float
        return struct.pack(layout, *_clamp(logprobs), *counts, *ids, *_clamp(numbers))


def _unpack_logprobs(
    body: bytes, offset: int, count: int
) -> tuple[tuple[float, ...], list[tuple[Alternative, ...]], int]:
    """The log-probabilities, the alternatives, and the offset behind them."""
    logprobs = struct.unpack_from(f"<{count}f", body, offset)
    counts = struct.unpack_from(f"<{count}B", body, offset + 4 * count)
    offset, total = offset + 5 * count, sum(counts)
    numbers = struct.unpack_from(f"<{total}i{total}f", body, offset)
    flat = map(Alternative, numbers[:total], numbers[total:])
    return logprobs, [tuple(islice(flat, number)) for number in counts], offset + 8 * total


def _clamp(numbers: list[float]) -> list[float]:
    return [min(max(number, _MIN_FLOAT), -_MIN_FLOAT) for number in numbers]
