"""A conversation outside the store: what every file format is read into and written from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from palaver.messages import Message, Role


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """A message in its place. Ids mean something within their transcript only."""

    id: str
    parent: str | None
    message: Message
    created_at: datetime | None = None
    model: str = ""
    whole: bool = True
    """False for a reply that was cut off, failed or still runs: nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Transcript:
    entries: tuple[TranscriptEntry, ...]
    """Every parent before its children."""
    title: str = ""
    system: str = ""
    tags: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None

    def branch(self, leaf: str | None) -> tuple[TranscriptEntry, ...]:
        """From the root to the leaf."""
        by_id = {entry.id: entry for entry in self.entries}
        found = []
        while leaf is not None:
            found.append(by_id[leaf])
            leaf = by_id[leaf].parent
        return tuple(reversed(found))

    def leaves(self) -> tuple[str, ...]:
        parents = {entry.parent for entry in self.entries}
        return tuple(entry.id for entry in self.entries if entry.id not in parents)

    def main(self) -> tuple[TranscriptEntry, ...]:
        """The branch of the head, to its end; without a head the one that was written last."""
        leaf = self.entries[-1].id if self.entries else None
        below = {self.head}
        for entry in self.entries:
            if self.head is not None and (entry.id == self.head or entry.parent in below):
                below.add(entry.id)
                leaf = entry.id
        return self.branch(leaf)


@dataclass(frozen=True, slots=True)
class SkippedConversation:
    """Something in a file that was left out, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class ReadResult:
    transcripts: tuple[Transcript, ...]
    skipped: tuple[SkippedConversation, ...] = ()


def linear(messages: Iterable[Message], **more: Any) -> Transcript:
    """A transcript without branches; system messages at its start are its system prompt."""
    row = list(messages)
    system = []
    while row and row[0].role is Role.SYSTEM:
        system.append(row.pop(0).text)
    entries = tuple(
        TranscriptEntry(str(number), str(number - 1) if number else None, message) for number, message in enumerate(row)
    )
    return Transcript(entries, system="\n\n".join(system), **more)


def in_order(entries: Iterable[TranscriptEntry]) -> tuple[tuple[TranscriptEntry, ...], tuple[SkippedConversation, ...]]:
    """Parents before children, whatever order they came in; those that hang in the air become roots and are told of."""
    waiting = {entry.id: entry for entry in entries}
    placed: dict[str, TranscriptEntry] = {}
    skipped = []
    for id in list(waiting):
        for entry in reversed(list(_upwards(id, waiting, placed))):
            if entry.parent is not None and entry.parent not in placed:
                skipped.append(
                    SkippedConversation(f"parent of message {entry.id}", f"there is no message {entry.parent}")
                )
                entry = TranscriptEntry(entry.id, None, entry.message, entry.created_at, entry.model, entry.whole)
            placed[entry.id] = entry
    return tuple(placed.values()), tuple(skipped)


def _upwards(
    id: str | None, waiting: Mapping[str, TranscriptEntry], placed: Mapping[str, TranscriptEntry]
) -> Iterator[TranscriptEntry]:
    """The entry and those above it that have no place yet; a circle is cut where it closes."""
    seen: set[str] = set()
    while id is not None and id in waiting and id not in placed and id not in seen:
        seen.add(id)
        yield waiting[id]
        id = waiting[id].parent
