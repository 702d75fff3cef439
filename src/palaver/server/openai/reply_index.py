"""Indexes of earlier replies, for clients that send a conversation back without its ids.

`ReplyIndex` finds the token ids of a reply by its text and the messages before it, so that the prefix cache hits.
`TranscriptIndex` finds the text of a spoken reply by the id of its recording."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachetools import LRUCache, TLRUCache

from palaver.errors import BadParameter
from palaver.messages import Message, Role, Text, Thinking, ToolCall
from palaver.server.openai.schemas import ChatMessage

MAX_TOKENS = 4_000_000
"""Of all replies in the index together. The least recently used is evicted first."""
MAX_TRANSCRIPTS = 1000


class ReplyIndex:
    """Token ids of replies by owner, earlier messages and text. The caller uses them only if the template renders the
    same bytes."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._replies: LRUCache[bytes, tuple[int, ...]] = LRUCache(max_tokens, getsizeof=len)

    def add(self, owner: str, before: Sequence[Message], reply: Message, ids: tuple[int, ...]) -> None:
        *_, key = message_digests(owner, (*before, reply))
        if len(ids) <= self._replies.maxsize:
            self._replies[key] = ids

    def lookup(
        self, owner: str, messages: Sequence[Message], sent: Sequence[tuple[int, ...] | None]
    ) -> tuple[tuple[int, ...] | None, ...]:
        """The ids of the replies among the messages: those that were sent, else those of the index."""
        keys = [
            key
            for key, message in zip(message_digests(owner, messages), messages, strict=True)
            if message.role is Role.ASSISTANT
        ]
        return tuple(ids or self._replies.get(key) for ids, key in zip(sent, keys, strict=True))


@dataclass(frozen=True, slots=True)
class _Transcript:
    text: str
    expires_at: int


class TranscriptIndex:
    """Transcripts of recordings by owner and recording id."""

    def __init__(self) -> None:
        self._transcripts: TLRUCache[tuple[str, str], _Transcript] = TLRUCache(
            MAX_TRANSCRIPTS, ttu=lambda _, transcript, now: transcript.expires_at, timer=time.time
        )

    def add(self, owner: str, recording_id: str, expires_at: int, text: str) -> None:
        self._transcripts[owner, recording_id] = _Transcript(text, expires_at)

    def resolve(self, owner: str, messages: Sequence[ChatMessage]) -> None:
        """Replaces the recordings in the messages by their transcripts."""
        for index, message in enumerate(messages):
            if message.audio is None:
                continue
            transcript = self._transcripts.get((owner, message.audio.id))
            if transcript is None:
                name = f"messages[{index}].audio.id"
                raise BadParameter(name, message.audio.id, "there is no such recording, or it has expired")
            if not message.content:
                message.content = transcript.text
            message.audio = None


def canonical_arguments(arguments: str) -> str:
    """The arguments of a call in one spelling: some clients send them back reformatted."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def message_digests(owner: str, messages: Sequence[Message]) -> Iterator[bytes]:
    """A digest for each message and all before it. Thinking does not count, because clients leave it out."""
    digest = hashlib.sha256(owner.encode())
    for message in messages:
        digest.update(f"\0{message.role}".encode())
        for part in message.parts:
            match part:
                case Thinking():
                    pass
                case Text(text):
                    digest.update(text.encode("utf-8", "surrogatepass"))
                case ToolCall(_, name, arguments):
                    digest.update(f"\1{name}\2{canonical_arguments(arguments)}".encode("utf-8", "surrogatepass"))
                case _:
                    digest.update(repr(part).encode("utf-8", "surrogatepass"))
        yield digest.digest()
