"""The stored forms of values: the JSON of parts, settings and usage, and the bytes of a reply's tokens.

The JSON is generated from the types (`palaver.encoding`) under pinned names: stored records are read by every later
version. Media are references to their blobs.

Tokens are binary: ids, log-probabilities and the five likeliest alternatives of each. Log-probabilities are stored as
32-bit floats. `as_stored` returns a step as it will be read back, so that events published before and after a crash are
the same.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from palaver.encoding import Tagged
from palaver.events import Usage
from palaver.generation import NO_LOGPROB, Alternative, Step
from palaver.messages import Audio, Image, Part, Text, Thinking, Tool, ToolCall, ToolResult, Video
from palaver.sampling import Sampling
from palaver.store.blobs import Blob, Blobs, Kind
from palaver.store.errors import Damaged

StoredPart = Text | Thinking | ToolCall | ToolResult | Blob
"""A part of a stored message: media are references to blobs."""
_TAGGED_PART = Annotated[StoredPart, Tagged]

_MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def media_part(blob: Blob, data: bytes) -> Image | Audio | Video:
    """The part of which the blob is the reference."""
    return _MEDIA[blob.kind](blob.media_type, data, blob.name, blob.width, blob.height, blob.seconds)


def store_media(parts: Iterable[Part | Blob], blobs: Blobs) -> tuple[StoredPart, ...]:
    """Writes media to blobs and returns the parts with references to them."""
    return tuple(
        Blob(
            *(part.type, part.media_type, blobs.put(part.data), len(part.data)),
            *(part.name, part.width, part.height, part.seconds),
        )
        if isinstance(part, Image | Audio | Video)
        else part
        for part in parts
    )


def load_media(parts: Iterable[StoredPart], blobs: Blobs) -> tuple[Part, ...]:
    """Reads media back from their blobs."""
    return tuple(media_part(part, blobs.get(part.digest)) if isinstance(part, Blob) else part for part in parts)


def blob_digests(parts: Iterable[StoredPart]) -> set[str]:
    return {part.digest for part in parts if isinstance(part, Blob)}


_LIMIT_FROM = "limit_from"
"""The entry in the options of a stored reply that `ReplySettings.limit_from` is read from."""


@dataclass(frozen=True, slots=True)
class ReplySettings:
    model: str
    sampling: Sampling
    """Includes the seed."""
    tokenizer: str = ""
    """The tokenizer's fingerprint. Token ids are valid only with the same tokenizer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The chat template's options, as JSON values."""
    tools: tuple[Tool, ...] = ()
    choice: int = 0
    fingerprints: tuple[tuple[int, str], ...] = ()
    """(index of its first token, `EngineInfo.fingerprint`) of each engine that computed the reply. The engine of tokens
    before the first index is unknown, such as in replies stored before fingerprints were."""
    answer_at: int | None = None
    """The token count at which the client asked for the answer, so that an open thought was closed."""

    @property
    def limit_from(self) -> int:
        """The token count from which `max_tokens` counts: the tokens that the reply began with, or had when it was
        continued after it had reached the limit."""
        tokens: int = self.options.get(_LIMIT_FROM, 0)
        return tokens

    def extended_at(self, tokens: int) -> ReplySettings:
        """The settings of a reply that gets `max_tokens` after these tokens: it begins with them, or had reached the
        limit and continues."""
        return replace(self, options={**self.options, _LIMIT_FROM: tokens})

    def continued_by(self, fingerprint: str, tokens: int) -> ReplySettings:
        """The settings of the reply when this engine computes it from token index `tokens` on."""
        before = tuple(part for part in self.fingerprints if part[0] < tokens)
        if not fingerprint or (before and before[-1][1] == fingerprint):
            return replace(self, fingerprints=before)
        return replace(self, fingerprints=(*before, (tokens, fingerprint)))


STORED_NAMES: Mapping[str, str] = {
    # parts; `type` of a blob is its kind
    "type": "type", "text": "text", "id": "id", "name": "name", "arguments": "arguments", "in_thought": "in_thought",
    "call_id": "call_id", "content": "content",
    "kind": "kind", "media_type": "media_type", "digest": "digest", "size": "size",
    "width": "width", "height": "height", "seconds": "seconds",
    # settings of a reply, tools
    "model": "model", "tokenizer": "tokenizer", "sampling": "sampling", "options": "options", "tools": "tools",
    "choice": "choice", "answer_at": "answer_at", "fingerprints": "fingerprints",
    "description": "description", "parameters": "parameters",
    # sampling, constraint
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "top_a": "top_a", "dynatemp_range": "dynatemp_range", "dynatemp_exponent": "dynatemp_exponent",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold", "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base", "dry_allowed_length": "dry_allowed_length", "dry_penalty_last_n": "dry_penalty_last_n",
    "dry_sequence_breakers": "dry_sequence_breakers",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "end_penalty": "end_penalty", "logit_bias": "logit_bias",
    "banned_ids": "banned_ids", "banned_strings": "banned_strings", "stop": "stop", "stop_ids": "stop_ids",
    "min_tokens": "min_tokens", "max_tokens": "max_tokens", "thinking_budget": "thinking_budget", "seed": "seed",
    "logprobs": "logprobs", "constraint": "constraint", "spoken": "spoken", "grammar": "grammar",
    "steps": "steps", "block_length": "block_length", "remasking": "remasking",
    # usage
    "prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "reply_tokens": "reply_tokens",
    "thinking_tokens": "thinking_tokens",
}  # fmt: skip
"""The name in the database of each field. A field that is renamed keeps its stored name; a new one gets an entry."""
_SETTINGS = ("sampling", "options", "tools", "choice", "answer_at", "fingerprints")
"""The settings in stored order. The model and the tokenizer have columns of their own."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Of a tuple of these values, so that the configuration applies to dataclasses, too."""
    return TypeAdapter(tuple[kind, ...], config=ConfigDict(alias_generator=_stored_name))


def _stored_name(name: str) -> str:
    if name not in STORED_NAMES:
        raise LookupError(f"the field {name!r} has no stored name: add it to STORED_NAMES")
    return STORED_NAMES[name]


def _encode(kind: Any, values: Iterable[Any], **options: Any) -> list[dict[str, Any]]:
    return list(_adapter(kind).dump_python(tuple(values), by_alias=True, **options))


def _decode(kind: Any, values: Iterable[Mapping[str, Any]]) -> tuple[Any, ...]:
    try:
        decoded: tuple[Any, ...] = _adapter(kind).validate_python(tuple(values))
    except ValidationError as error:
        raise Damaged(f"A record of the database is not understood: {_reason(error)}.") from None
    return decoded


def _reason(error: ValidationError) -> str:
    return str(error.errors(include_url=False)[0]["msg"])


def encode_parts(parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    return [_encode_part(value) for value in _encode(_TAGGED_PART, parts)]


_ADDED_TO_BLOBS = ("name", "width", "height", "seconds")


def _encode_part(value: dict[str, Any]) -> dict[str, Any]:
    """Excludes fields that were added later and are empty, so that old records stay the same."""
    if value["type"] == "blob":
        kind = value.pop("kind")
        return {**{name: item for name, item in value.items() if name not in _ADDED_TO_BLOBS or item}, "type": kind}
    return {name: item for name, item in value.items() if name != "in_thought" or item}


def decode_parts(values: Sequence[Mapping[str, Any]]) -> tuple[StoredPart, ...]:
    kinds = get_args(Kind)
    return _decode(
        _TAGGED_PART,
        ({**value, "type": "blob", "kind": value["type"]} if value.get("type") in kinds else value for value in values),
    )


def encode_settings(settings: ReplySettings) -> dict[str, Any]:
    (value,) = _encode(ReplySettings, [settings])
    value["sampling"] = encode_sampling(settings.sampling)
    optional = ("answer_at", "fingerprints")
    return {name: value[name] for name in _SETTINGS if name not in optional or value[name] not in (None, ())}


def decode_settings(model: str, tokenizer: str, value: Mapping[str, Any]) -> ReplySettings:
    settings: ReplySettings
    (settings,) = _decode(ReplySettings, [{**value, "model": model, "tokenizer": tokenizer}])
    return settings


def encode_sampling(sampling: Sampling) -> dict[str, Any]:
    """Only parameters that differ from the defaults, so that a new parameter changes no old record."""
    return _encode(Sampling, [sampling], exclude_defaults=True)[0]


def encode_usage(usage: Usage) -> dict[str, Any]:
    return _encode(Usage, [usage])[0]


def decode_usage(value: Mapping[str, Any]) -> Usage:
    usage: Usage
    (usage,) = _decode(Usage, [value])
    return usage


ALTERNATIVES = 5

_HEADER = struct.Struct("<BBI")
_RAW, _COMPRESSED = 1, 2
_MIN_COMPRESSED = 256
"""Shorter bodies are stored uncompressed."""
_MIN_FLOAT = -3e38


def as_stored(step: Step) -> Step:
    """The step as it is read again: with five alternatives at most, and numbers of 32 bits."""
    raw, drawn = step.alternatives[:ALTERNATIVES], step.drawn_from[:ALTERNATIVES]
    sampled = () if step.drawn_logprob is None else (step.drawn_logprob,)
    numbers = (step.logprob, *sampled, *[one.logprob for one in raw], *[one.logprob for one in drawn])
    layout = f"<{len(numbers)}f"
    try:
        rounded = struct.unpack(layout, struct.pack(layout, *numbers))
    except OverflowError:
        return unpack_tokens(pack_tokens((step,)))[0]
    if rounded == numbers and raw == step.alternatives and drawn == step.drawn_from:
        return step
    rest = iter(rounded)
    logprob, drawn_logprob = next(rest), next(rest) if sampled else None
    if drawn_logprob != drawn_logprob:  # NaN is stored for None
        drawn_logprob = None
    alternatives = tuple([Alternative(one.token_id, next(rest)) for one in raw])
    drawn_from = tuple([Alternative(one.token_id, next(rest)) for one in drawn])
    return Step(step.token_id, logprob, alternatives, drawn_logprob, drawn_from)


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
    return _pack_body(drawn, len(steps), body)


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
        raise _damaged(error) from error


def merge_tokens(packed: Sequence[bytes]) -> bytes:
    """What `pack_tokens` returns for the tokens of all these, without a step for each."""
    try:
        frames = [_read_frame(data) for data in packed]
        count, drawn = sum(frame.count for frame in frames), any(frame.drawn for frame in frames)
        body = _join_columns([(frame.ids, *frame.raw) for frame in frames])
        if drawn:
            body += _join_columns([frame.drawn or _no_logprobs(frame.count) for frame in frames])
    except (struct.error, zlib.error) as error:
        raise _damaged(error) from error
    return _pack_body(drawn, count, body)


_Columns = tuple[bytes, ...]
"""Log-probabilities, number of alternatives, their ids, their log-probabilities."""


@dataclass(frozen=True, slots=True)
class _PackedTokens:
    """Packed tokens, column by column."""

    count: int
    ids: bytes
    raw: _Columns
    drawn: _Columns | None


def _read_frame(data: bytes) -> _PackedTokens:
    kind, drawn, count = _HEADER.unpack_from(data)
    body = data[_HEADER.size :] if kind == _RAW else zlib.decompress(data[_HEADER.size :])
    raw, offset = _read_columns(body, 4 * count, count)
    return _PackedTokens(count, body[: 4 * count], raw, _read_columns(body, offset, count)[0] if drawn else None)


def _read_columns(body: bytes, offset: int, count: int) -> tuple[_Columns, int]:
    """The columns of the log-probabilities, and the offset behind them."""
    counts = body[offset + 4 * count : offset + 5 * count]
    ids = offset + 5 * count
    numbers = ids + 4 * sum(counts)
    end = numbers + 4 * sum(counts)
    if end > len(body):
        raise struct.error("they are cut off")
    return (body[offset : offset + 4 * count], counts, body[ids:numbers], body[numbers:end]), end


def _no_logprobs(count: int) -> _Columns:
    return struct.pack("<f", NO_LOGPROB) * count, bytes(count), b"", b""


def _join_columns(frames: Sequence[_Columns]) -> bytes:
    return b"".join(part for column in zip(*frames, strict=True) for part in column)


def _pack_body(drawn: bool, count: int, body: bytes) -> bytes:
    kind = _RAW if len(body) < _MIN_COMPRESSED else _COMPRESSED
    return _HEADER.pack(kind, drawn, count) + (body if kind == _RAW else zlib.compress(body, 1))


def _damaged(error: Exception) -> Damaged:
    return Damaged(f"The tokens of a reply can't be read ({error}): restore a backup.")


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
