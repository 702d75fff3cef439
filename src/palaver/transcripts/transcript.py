"""A conversation outside the store: the common form that every file format is read into and written from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from palaver.messages import Message, Role


@dataclass(frozen=True, slots=True)
class TranscriptEntry:
    """A message with its position in the tree. Ids are valid within their transcript only."""

    id: str
    parent: str | None
    message: Message
    created_at: datetime | None = None
    model: str = ""
    complete: bool = True
    """False for a reply that was cut off, failed or still runs: not used for training."""


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
        branch = []
        while leaf is not None:
            branch.append(by_id[leaf])
            leaf = by_id[leaf].parent
        return tuple(reversed(branch))

    def leaves(self) -> tuple[str, ...]:
        parents = {entry.parent for entry in self.entries}
        return tuple(entry.id for entry in self.entries if entry.id not in parents)

    def main_branch(self) -> tuple[TranscriptEntry, ...]:
        """The branch through the head, to its leaf; without a head the branch that was written last."""
        leaf = self.entries[-1].id if self.entries else None
        descendants = {self.head}
        for entry in self.entries:
            if self.head is not None and (entry.id == self.head or entry.parent in descendants):
                descendants.add(entry.id)
                leaf = entry.id
        return self.branch(leaf)


@dataclass(frozen=True, slots=True)
class SkippedConversation:
    """A part of a file that was not imported, and the reason."""

    item: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadResult:
    transcripts: tuple[Transcript, ...]
    skipped: tuple[SkippedConversation, ...] = ()


def linear_transcript(messages: Iterable[Message], **fields: Any) -> Transcript:
    """A transcript without branches. Leading system messages become its system prompt."""
    remaining = list(messages)
    system = []
    while remaining and remaining[0].role is Role.SYSTEM:
        system.append(remaining.pop(0).text)
    entries = tuple(
        TranscriptEntry(str(number), str(number - 1) if number else None, message)
        for number, message in enumerate(remaining)
    )
    return Transcript(entries, system="\n\n".join(system), **fields)


def sort_parents_first(
    entries: Iterable[TranscriptEntry],
) -> tuple[tuple[TranscriptEntry, ...], tuple[SkippedConversation, ...]]:
    """Sorts parents before children. Entries whose parent is missing become roots and are reported."""
    pending = {entry.id: entry for entry in entries}
    sorted_entries: dict[str, TranscriptEntry] = {}
    skipped = []
    for id in list(pending):
        for entry in reversed(list(_unsorted_ancestors(id, pending, sorted_entries))):
            if entry.parent is not None and entry.parent not in sorted_entries:
                skipped.append(
                    SkippedConversation(f"parent of message {entry.id}", f"there is no message {entry.parent}")
                )
                entry = TranscriptEntry(entry.id, None, entry.message, entry.created_at, entry.model, entry.complete)
            sorted_entries[entry.id] = entry
    return tuple(sorted_entries.values()), tuple(skipped)


def _unsorted_ancestors(
    id: str | None, pending: Mapping[str, TranscriptEntry], sorted_entries: Mapping[str, TranscriptEntry]
) -> Iterator[TranscriptEntry]:
    """The entry and its ancestors that are not sorted yet. A cycle is cut where it closes."""
    seen: set[str] = set()
    while id is not None and id in pending and id not in sorted_entries and id not in seen:
        seen.add(id)
        yield pending[id]
        id = pending[id].parent


def parse_time(value: Any) -> datetime | None:
    """A time in seconds or milliseconds, or in ISO 8601. None for anything else."""
    try:
        if isinstance(value, str):
            found = datetime.fromisoformat(value)
            return found if found.tzinfo else found.replace(tzinfo=UTC)
        if isinstance(value, int | float) and value:
            return datetime.fromtimestamp(value / 1000 if value > 1e11 else value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None
