"""Parts of a message as JSON and back. Media are named by their blob."""

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
"""A part as a message in the store holds it."""

_MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def store_media(parts: Iterable[Part | Blob], blobs: Blobs) -> tuple[StoredPart, ...]:
    """The parts with their media put away as blobs."""
    return tuple(_deposit(part, blobs) for part in parts)


def load_media(parts: Iterable[StoredPart], blobs: Blobs) -> tuple[Part, ...]:
    """The parts with their media read back."""
    return tuple(
        _MEDIA[part.kind](part.media_type, blobs.get(part.digest)) if isinstance(part, Blob) else part for part in parts
    )


def media_digests(parts: Iterable[StoredPart]) -> set[str]:
    return {part.digest for part in parts if isinstance(part, Blob)}


def parts_to_json(parts: Iterable[StoredPart]) -> list[dict[str, Any]]:
    return [_to_json(part) for part in parts]


def parts_from_json(values: Sequence[Mapping[str, Any]]) -> tuple[StoredPart, ...]:
    return tuple(_from_json(value) for value in values)


def _deposit(part: Part | Blob, blobs: Blobs) -> StoredPart:
    match part:
        case Image(media_type, data):
            return Blob("image", media_type, blobs.put(data), len(data))
        case Audio(media_type, data):
            return Blob("audio", media_type, blobs.put(data), len(data))
        case Video(media_type, data):
            return Blob("video", media_type, blobs.put(data), len(data))
        case _:
            return part


def _to_json(part: StoredPart) -> dict[str, Any]:
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


def _from_json(value: Mapping[str, Any]) -> StoredPart:
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
    """The seed is in it."""
    tokenizer: str = ""
    """The tokenizer's fingerprint: token ids mean something only where it is the same."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The template's options, as JSON can say them."""
    tools: tuple[Tool, ...] = ()
    choice: int = 0
    fingerprints: tuple[tuple[int, str], ...] = ()
    """The engines that computed it (`EngineInfo.fingerprint`), each with its first token. Nothing is known of tokens
    before the first of them, such as those of replies that were stored before fingerprints were."""

    answer_at: int | None = None
    """How many tokens the reply had when somebody asked for the answer: there an open thought was closed."""

    def continued_by(self, fingerprint: str, tokens: int) -> ReplySettings:
        """The settings of the same reply, computed by this engine from so many tokens on."""
        before = tuple(part for part in self.fingerprints if part[0] < tokens)
        if not fingerprint or (before and before[-1][1] == fingerprint):
            return replace(self, fingerprints=before)
        return replace(self, fingerprints=(*before, (tokens, fingerprint)))


def settings_to_json(settings: ReplySettings) -> dict[str, Any]:
    """Without the model and the tokenizer, which are columns."""
    return {
        "sampling": sampling_to_json(settings.sampling),
        "options": dict(settings.options),
        "tools": [asdict(tool) for tool in settings.tools],
        "choice": settings.choice,
        **({"answer_at": settings.answer_at} if settings.answer_at is not None else {}),
        **({"fingerprints": [list(part) for part in settings.fingerprints]} if settings.fingerprints else {}),
    }


def settings_from_json(model: str, tokenizer: str, value: Mapping[str, Any]) -> ReplySettings:
    return ReplySettings(
        model=model,
        sampling=sampling_from_json(value["sampling"]),
        tokenizer=tokenizer,
        options=value["options"],
        tools=tuple(Tool(**tool) for tool in value["tools"]),
        choice=value["choice"],
        answer_at=value.get("answer_at"),
        fingerprints=tuple((start, made_by) for start, made_by in value.get("fingerprints", ())),
    )


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from the plainest sampling, so that a new parameter changes no old record."""
    plain = Sampling()
    return {
        one.name: asdict(value) if isinstance(value, Constraint) else value
        for one in fields(Sampling)
        if (value := getattr(sampling, one.name)) != getattr(plain, one.name)
    }


def sampling_from_json(value: Mapping[str, Any]) -> Sampling:
    return Sampling(**{name: _restored(name, one) for name, one in value.items()})


def _restored(name: str, value: Any) -> Any:
    if name == "constraint":
        return Constraint(Grammar(value["grammar"]), value["text"])
    if name == "logit_bias":
        return tuple((int(token), float(bias)) for token, bias in value)
    return tuple(value) if isinstance(value, list) else value
