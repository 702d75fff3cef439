"""The JSON encoding of what the database keeps: parts of a message, settings of a reply, sampling parameters.

The names in the JSON are pinned: stored records are read by every later version. Media are encoded as references to
their blobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, assert_never

from palaver.constraints import Constraint, Grammar
from palaver.messages import Audio, Image, Part, Text, Thinking, Tool, ToolCall, ToolResult, Video
from palaver.sampling import Sampling
from palaver.store.blobs import Blob, Blobs
from palaver.store.errors import Damaged

StoredPart = Text | Thinking | ToolCall | ToolResult | Blob
"""A part of a stored message: media are references to blobs."""

_MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def store_media(parts: Iterable[Part | Blob], blobs: Blobs) -> tuple[StoredPart, ...]:
    """Writes media to blobs and returns the parts with references to them."""
    return tuple(_store_part(part, blobs) for part in parts)


def load_media(parts: Iterable[StoredPart], blobs: Blobs) -> tuple[Part, ...]:
    """Reads media back from their blobs."""
    return tuple(
        _MEDIA[part.kind](part.media_type, blobs.get(part.digest)) if isinstance(part, Blob) else part for part in parts
    )


def blob_digests(parts: Iterable[StoredPart]) -> set[str]:
    return {part.digest for part in parts if isinstance(part, Blob)}


def encode_parts(parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    return [_encode_part(part) for part in parts]


def decode_parts(values: Sequence[Mapping[str, Any]]) -> tuple[StoredPart, ...]:
    return tuple(_decode_part(value) for value in values)


def _store_part(part: Part | Blob, blobs: Blobs) -> StoredPart:
    match part:
        case Image(media_type, data):
            return Blob("image", media_type, blobs.put(data), len(data))
        case Audio(media_type, data):
            return Blob("audio", media_type, blobs.put(data), len(data))
        case Video(media_type, data):
            return Blob("video", media_type, blobs.put(data), len(data))
        case _:
            return part


def _encode_part(part: StoredPart) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Thinking(text):
            return {"type": "thinking", "text": text}
        case ToolCall(id, name, arguments, in_thought):
            call = {"type": "tool_call", "id": id, "name": name, "arguments": arguments}
            return {**call, "in_thought": True} if in_thought else call
        case ToolResult(call_id, content, name):
            return {"type": "tool_result", "call_id": call_id, "content": content, "name": name}
        case Blob(kind, media_type, digest, size):
            return {"type": kind, "media_type": media_type, "digest": digest, "size": size}
        case _:
            assert_never(part)


def _decode_part(value: Mapping[str, Any]) -> StoredPart:
    match value:
        case {"type": "text", "text": text}:
            return Text(text)
        case {"type": "thinking", "text": text}:
            return Thinking(text)
        case {"type": "tool_call", "id": id, "name": name, "arguments": arguments}:
            return ToolCall(id, name, arguments, value.get("in_thought", False))
        case {"type": "tool_result", "call_id": call_id, "content": content, "name": name}:
            return ToolResult(call_id, content, name)
        case {"type": "image" | "audio" | "video" as kind, "media_type": media_type, "digest": digest, "size": size}:
            return Blob(kind, media_type, digest, size)
        case _:
            raise Damaged(f"A message holds a part that is not known: {value.get('type')!r}.")


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


def encode_settings(settings: ReplySettings) -> dict[str, Any]:
    """Excludes the model and the tokenizer, which have columns of their own."""
    return {
        "sampling": encode_sampling(settings.sampling),
        "options": dict(settings.options),
        "tools": [asdict(tool) for tool in settings.tools],
        "choice": settings.choice,
        **({"answer_at": settings.answer_at} if settings.answer_at is not None else {}),
        **({"fingerprints": [list(part) for part in settings.fingerprints]} if settings.fingerprints else {}),
    }


def decode_settings(model: str, tokenizer: str, value: Mapping[str, Any]) -> ReplySettings:
    return ReplySettings(
        model=model,
        sampling=decode_sampling(value["sampling"]),
        tokenizer=tokenizer,
        options=value["options"],
        tools=tuple(Tool(**tool) for tool in value["tools"]),
        choice=value["choice"],
        answer_at=value.get("answer_at"),
        fingerprints=tuple((start, fingerprint) for start, fingerprint in value.get("fingerprints", ())),
    )


def encode_sampling(sampling: Sampling) -> dict[str, Any]:
    """Only parameters that differ from the defaults, so that a new parameter changes no old record."""
    defaults = Sampling()
    return {
        one.name: asdict(value) if isinstance(value, Constraint) else value
        for one in fields(Sampling)
        if (value := getattr(sampling, one.name)) != getattr(defaults, one.name)
    }


def decode_sampling(value: Mapping[str, Any]) -> Sampling:
    return Sampling(**{name: _decode_sampling_value(name, one) for name, one in value.items()})


def _decode_sampling_value(name: str, value: Any) -> Any:
    if name == "constraint":
        return Constraint(Grammar(value["grammar"]), value["text"])
    if name == "logit_bias":
        return tuple((int(token), float(bias)) for token, bias in value)
    return tuple(value) if isinstance(value, list) else value
