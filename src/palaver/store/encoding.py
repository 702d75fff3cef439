"""The JSON of what the database keeps: parts of a message, settings and usage of a reply.

It is generated from the types (`palaver.encoding`) under pinned names: stored records are read by every later version.
Media are references to their blobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from palaver.encoding import Tagged
from palaver.events import Usage
from palaver.messages import Audio, Image, Part, Text, Thinking, Tool, ToolCall, ToolResult, Video
from palaver.sampling import Sampling
from palaver.store.blobs import Blob, Blobs, Kind
from palaver.store.errors import Damaged

StoredPart = Text | Thinking | ToolCall | ToolResult | Blob
"""A part of a stored message: media are references to blobs."""
_TAGGED_PART = Annotated[StoredPart, Tagged]

_MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def media_part(kind: Kind, media_type: str, data: bytes) -> Image | Audio | Video:
    return _MEDIA[kind](media_type, data)


def store_media(parts: Iterable[Part | Blob], blobs: Blobs) -> tuple[StoredPart, ...]:
    """Writes media to blobs and returns the parts with references to them."""
    return tuple(
        Blob(part.type, part.media_type, blobs.put(part.data), len(part.data))
        if isinstance(part, Image | Audio | Video)
        else part
        for part in parts
    )


def load_media(parts: Iterable[StoredPart], blobs: Blobs) -> tuple[Part, ...]:
    """Reads media back from their blobs."""
    return tuple(
        media_part(part.kind, part.media_type, blobs.get(part.digest)) if isinstance(part, Blob) else part
        for part in parts
    )


def blob_digests(parts: Iterable[StoredPart]) -> set[str]:
    return {part.digest for part in parts if isinstance(part, Blob)}


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
    # settings of a reply, tools
    "model": "model", "tokenizer": "tokenizer", "sampling": "sampling", "options": "options", "tools": "tools",
    "choice": "choice", "answer_at": "answer_at", "fingerprints": "fingerprints",
    "description": "description", "parameters": "parameters",
    # sampling, constraint
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "end_penalty": "end_penalty", "logit_bias": "logit_bias",
    "banned_ids": "banned_ids", "banned_strings": "banned_strings", "stop": "stop", "stop_ids": "stop_ids",
    "min_tokens": "min_tokens", "max_tokens": "max_tokens", "thinking_budget": "thinking_budget", "seed": "seed",
    "logprobs": "logprobs", "constraint": "constraint", "spoken": "spoken", "grammar": "grammar",
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


def _encode_part(value: dict[str, Any]) -> dict[str, Any]:
    """Excludes `in_thought` unless it is true, so that old records stay the same."""
    if value["type"] == "blob":
        kind = value.pop("kind")
        return {**value, "type": kind}
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
