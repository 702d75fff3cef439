"""The numbered event log of one turn, and the recorder that stores its tokens.

Only events that are read from tokens have a number, so that event n is the same after a crash: it is always made of
the same tokens. The status of the turn (waiting, started, ended) has no number: every subscriber gets the current one,
and gets it again after reconnecting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from palaver.encoding import Tagged
from palaver.errors import BadParameter
from palaver.events import DraftBlock, Event, Failed, Finished, ReadEvent, ReplyBatch, Snapshot, Started, Waiting
from palaver.generation import Step
from palaver.store import Lease, LeaseLost, Store, StoreError, TokenFrame

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`number` is the count of numbered events up to here. A subscriber that reconnects continues after it."""

    number: int
    event: Annotated[Event, Tagged]


class Log(Generic[T]):
    """Append-only, with a current status. Readers never slow the writer down: each keeps its own position."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._status: tuple[int, T] | None = None
        """With the number of items before it."""
        self._draft: T | None = None
        """What is not final yet, after the last item."""
        self.ended = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: T, last: bool = False) -> None:
        """`last` ends the log."""
        assert not self.ended
        self._draft = None
        self._items.append(item)
        self.ended = last
        self._notify()

    def set_status(self, status: T | None) -> None:
        """Replaces the status. Every reader gets the current one, after the items before it."""
        self._status = None if status is None else (len(self._items), status)
        self._notify()

    def set_draft(self, draft: T) -> None:
        """Replaces the draft. Readers get the newest one, until the next item replaces it."""
        self._draft = draft
        self._notify()

    async def follow(self, position: int = 0) -> AsyncGenerator[T]:
        """The items from that position on and the status, as they come, to the end of the log."""
        sent = sent_draft = None
        while True:
            changed, status, draft = self._changed, self._status, self._draft
            if status is not None and status is not sent and position >= status[0]:
                sent = status
                yield status[1]
            elif position < len(self._items):
                position += 1
                yield self._items[position - 1]
            elif draft is not None and draft is not sent_draft:
                sent_draft = draft
                yield draft
            elif self.ended:
                return
            else:
                await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class TurnLog(Log[ReplyBatch]):
    """The batches of a turn."""

    def __init__(self, batches: Iterable[ReplyBatch] = ()) -> None:
        super().__init__()
        self._count = 0
        """The number of numbered events."""
        self._has_snapshot = False
        for batch in batches:
            self.add(batch)

    @property
    def started(self) -> bool:
        """Whether the turn has left the queue."""
        return self._status is not None and isinstance(self._status[1].events[0], Started)

    def add(self, batch: ReplyBatch) -> None:
        match batch.events[0]:
            case Waiting() | Started():
                self.set_status(batch)
            case DraftBlock():
                self.set_draft(batch)
            case Finished() | Failed():
                self.append(batch, last=True)
            case Snapshot():
                self._has_snapshot = True
                self.append(batch)
            case _:
                self._count += len(batch.events)
                self.append(batch)

    def so_far(self) -> tuple[ReplyBatch, ...]:
        return tuple(self._items)

    def events(self) -> list[ReadEvent]:
        """The numbered events so far."""
        return [event for batch in self._items for event in batch.events if isinstance(event, ReadEvent)]

    async def wait_for(self, after: int) -> None:
        """Waits until the log holds that number of events. Raises BadParameter if the turn never had as many."""
        while after > self._count and not (self.ended or self.started):  # resumed: stored tokens are still being read
            await self._changed.wait()
        self.check_number(after)

    def check_number(self, after: int) -> None:
        """Raises BadParameter for a number beyond the log. With a snapshot every number is accepted."""
        if not self._has_snapshot and not 0 <= after <= self._count:
            raise BadParameter("after", after, f"the turn has {self._count} events")


async def numbered(batches: AsyncGenerator[ReplyBatch], after: int) -> AsyncGenerator[LogEntry]:
    """The entries after that number. Closing it closes the batches."""
    number = 0
    async with aclosing(batches):
        async for batch in batches:
            for event in batch.events:
                if not isinstance(event, ReadEvent):
                    yield LogEntry(max(number, after), event)
                    continue
                number += 1
                if number > after:
                    yield LogEntry(number, event)


class RecorderClosed(StoreError):
    def __init__(self) -> None:
        super().__init__("The rest of the reply could not be stored. The reply can be continued.")


_Frame = tuple[TokenFrame, asyncio.Future[None]]


class TokenRecorder:
    """Stores the tokens of all turns: all that arrive during one transaction go into the next."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self.lease = lease
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting: list[_Frame] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, reply_id: str, position: int, steps: Sequence[Step], timings: Mapping[str, float]) -> None:
        """Returns once the tokens are committed. Raises the error of the write, such as LeaseLost."""
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((TokenFrame(reply_id, position, tuple(steps), timings), recorded))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await recorded

    def close(self) -> None:
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch: list[_Frame] = []
            try:
                await asyncio.sleep(0)  # lets the other turns of the same engine step add their tokens
                batch, self._waiting = self._waiting, []
                frames = [frame for frame, _ in batch]
                _resolve(batch, await loop.run_in_executor(self._thread, self._commit, frames))
            except Exception as error:
                _resolve(batch, [error] * len(batch))
            except BaseException:  # this task was cancelled: nothing more is written
                batch += self._waiting
                self._waiting = []
                _resolve(batch, [RecorderClosed()] * len(batch))
                raise

    def _commit(self, frames: list[TokenFrame]) -> list[Exception | None]:
        try:
            lost = self._store.replies.append(self.lease, frames)
        except StoreError:
            raise
        except Exception as error:  # not the database: one reply must not fail the others
            if len(frames) == 1:
                return [error]
            return [result for frame in frames for result in self._commit([frame])]
        return [LeaseLost(frame.reply_id) if frame.reply_id in lost else None for frame in frames]


def _resolve(batch: Sequence[_Frame], results: Sequence[Exception | None]) -> None:
    for (_, future), error in zip(batch, results, strict=True):
        if future.done():  # its turn was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
