"""Clients that name no response before theirs send all that was said again: the branch on which it was said is found
by its words, so that one conversation stays one. What is forgotten begins a new conversation, which costs nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from palaver.messages import Message, Role
from palaver.server.openai.remembering import digests

MOST = 50_000
"""Replies that are remembered; the one that was not asked for longest is forgotten first."""


class Branches:
    """Replies of stored responses by what they and all before them say."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._replies: OrderedDict[bytes, str] = OrderedDict()

    def keep(self, owner: str, branch: Sequence[Message], reply: str) -> None:
        """`branch` ends with the reply."""
        *_, key = digests(owner, branch)
        self._replies[key] = reply
        self._replies.move_to_end(key)
        while len(self._replies) > self._most:
            self._replies.popitem(last=False)

    def find(self, owner: str, messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
        """The replies among the messages that are known, the last first, and how many messages there are up to each."""
        keys = list(digests(owner, messages))
        for place in reversed(range(len(messages))):
            reply = self._replies.get(keys[place]) if messages[place].role is Role.ASSISTANT else None
            if reply is not None:
                self._replies.move_to_end(keys[place])
                yield reply, place + 1
