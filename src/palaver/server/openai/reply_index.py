"""Clients without a conversation send text back, not tokens: the ids that a reply was made of are found again by what
was said before it and by its words, so that what was computed for it is reused."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from palaver.messages import Message, Role, Text, Thinking, ToolCall

MAX_TOKENS = 4_000_000
"""Of all remembered replies together; the one that was not asked for longest is forgotten first."""


class ReplyIndex:
    """Replies by what led to them. Only where the template writes the very same bytes are their ids used."""

    def __init__(self, most: int = MAX_TOKENS) -> None:
        self._most = most
        self._tokens = 0
        self._replies: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def keep(self, owner: str, before: Sequence[Message], reply: Message, ids: tuple[int, ...]) -> None:
        *_, key = message_digests(owner, (*before, reply))
        self._tokens += len(ids) - len(self._replies.pop(key, ()))
        self._replies[key] = ids
        while self._tokens > self._most:
            self._tokens -= len(self._replies.popitem(last=False)[1])

    def past(
        self, owner: str, messages: Sequence[Message], sent: Sequence[tuple[int, ...] | None]
    ) -> tuple[tuple[int, ...] | None, ...]:
        """The ids of the replies among the messages: as they were sent, or as they are remembered."""
        keys = [
            key
            for key, one in zip(message_digests(owner, messages), messages, strict=True)
            if one.role is Role.ASSISTANT
        ]
        return tuple(ids or self._found(key) for ids, key in zip(sent, keys, strict=True))

    def _found(self, key: bytes) -> tuple[int, ...] | None:
        if key not in self._replies:
            return None
        self._replies.move_to_end(key)
        return self._replies[key]


def canonical_arguments(arguments: str) -> str:
    """A call's arguments in one spelling: some clients send them back as values instead of the text they were."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def message_digests(owner: str, messages: Sequence[Message]) -> Iterator[bytes]:
    """For each message, what it and all before it come to. Thinking is left out, because clients do."""
    whole = hashlib.sha256(owner.encode())
    for message in messages:
        whole.update(f"\0{message.role}".encode())
        for part in message.parts:
            match part:
                case Thinking():
                    pass
                case Text(text):
                    whole.update(text.encode("utf-8", "surrogatepass"))
                case ToolCall(_, name, arguments):
                    whole.update(f"\1{name}\2{canonical_arguments(arguments)}".encode("utf-8", "surrogatepass"))
                case _:
                    whole.update(repr(part).encode("utf-8", "surrogatepass"))
        yield whole.digest()
