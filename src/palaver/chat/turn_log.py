"""The numbered event log of one turn, and the recorder that stores its tokens.

Only events that are read from tokens have a number, so that event n is the same after a crash: it is always made of
the same tokens. The status of the turn (waiting, started, ended) has no number: every subscriber gets the current one,
and gets it again after reconnecting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Generic, ParamSpec, TypeVar

from palaver.encoding import Tagged
from palaver.errors import BadParameter
from palaver.events import DraftBlock, Event, Failed, Finished, ReadEvent, ReplyBatch, Snapshot, Started, Waiting
from palaver.generation import Step
from palaver.store import Disconnected, Lease, LeaseLost, Store, StoreError, TokenCountMismatch, TokenFrame

OUTAGE_SECONDS = 600.0
"""How long turns and their readers wait for a database that does not answer."""
RETRY_SECONDS = (0.05, 1.0)
"""The first and the longest pause between attempts to reach it."""
COMMIT_SECONDS = 0.008
"""How long tokens wait for those of other turns, after the start of the commit before."""
FIRST_TOKENS = 2
"""Tokens of a turn that wait for no others: with them it has text, mostly, and somebody waits for that."""
T = TypeVar("T")
P = ParamSpec("P")
_log = logging.getLogger(__name__)


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


async def outlast(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Calls the store in a thread, again and again while the database does not answer."""
    return await outlast_all(lambda: asyncio.to_thread(call, *arguments, **named))


async def outlast_all(attempt: Callable[[], Awaitable[T]]) -> T:
    """The same for several calls, which are all repeated."""
    begun, (pause, longest) = time.monotonic(), RETRY_SECONDS
    while True:
        try:
            return await attempt()
        except Disconnected:
            if time.monotonic() - begun > OUTAGE_SECONDS:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


class RecorderClosed(StoreError):
    def __init__(self) -> None:
        super().__init__("The rest of the reply could not be stored. The reply can be continued.")


@dataclass(frozen=True, slots=True)
class _WaitingTokens:
    tokens: TokenFrame
    earlier: Sequence[Step]
    """The tokens before them that this process recorded."""
    recorded: asyncio.Future[None]

    def after(self, count: int) -> TokenFrame:
        """The tokens that are missing in a store that has so many. Raises TokenCountMismatch if not all are known."""
        tokens = self.tokens
        known = (*self.earlier, *tokens.steps)
        first = tokens.start - len(self.earlier)
        if not first <= count <= tokens.end:
            raise TokenCountMismatch({tokens.reply_id: count})
        return TokenFrame(tokens.reply_id, count, known[count - first :], tokens.timings)


class TokenRecorder:
    """Stores the tokens of all turns: all that arrive during one transaction go into the next.

    A commit costs the same for one turn as for many, here and in every process that is notified of it. So it waits
    a few milliseconds while most of the running turns have no tokens in it, but not after a pause, nor if it has the
    first tokens of a turn.

    While the database does not answer, they wait. When it is back it may have lost the last commits, and may have one
    that was not confirmed: what is missing is stored, unless another process has taken the reply over.
    """

    def __init__(self, store: Store, lease: Lease, count_running: Callable[[], int]) -> None:
        """`count_running`: the number of turns that may have tokens."""
        self._store = store
        self.lease = lease
        self._count_running = count_running
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting: list[_WaitingTokens] = []
        self._begun_at = float("-inf")
        """When the last commit began."""
        self._most = 0
        """The number of turns for whose tokens the next commit waits."""
        self._has_most = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._closed = False

    async def record(
        self,
        reply_id: str,
        position: int,
        steps: Sequence[Step],
        timings: Mapping[str, float],
        earlier: Sequence[Step] = (),
    ) -> None:
        """Returns once the tokens are committed. Raises the error of the write, such as LeaseLost.

        `earlier`: the tokens before them that were recorded in this run.
        """
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingTokens(TokenFrame(reply_id, position, tuple(steps), timings), earlier, recorded))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        elif len(self._waiting) >= self._most or len(earlier) < FIRST_TOKENS:
            self._has_most.set()
        await recorded

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch: list[_WaitingTokens] = []
            try:
                await asyncio.sleep(0)  # lets the other turns of the same engine step add their tokens
                await self._wait_for_others()
                batch, self._waiting = self._waiting, []
                commit = partial(self._commit, batch)
                try:
                    results = await loop.run_in_executor(self._thread, commit)
                except Disconnected:
                    _log.warning("the database does not answer: the tokens of %d replies wait", len(batch))
                    results = await outlast_all(lambda: self._commit_later(commit))  # noqa: B023
                    _log.warning("the database answers again: replies go on")
                _resolve(batch, results)
            except Exception as error:
                _resolve(batch, [error] * len(batch))
            except BaseException:  # this task was cancelled: nothing more is written
                batch += self._waiting
                self._waiting = []
                _resolve(batch, [RecorderClosed()] * len(batch))
                raise

    async def _wait_for_others(self) -> None:
        pause = self._begun_at + COMMIT_SECONDS - time.monotonic()
        self._most = (self._count_running() + 1) // 2
        is_first = any(len(one.earlier) < FIRST_TOKENS for one in self._waiting)
        if pause > 0 and len(self._waiting) < self._most and not is_first:
            self._has_most.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._has_most.wait()
        self._begun_at = time.monotonic()

    async def _commit_later(self, commit: Callable[[], list[Exception | None]]) -> list[Exception | None]:
        """The next attempt after one that did not reach the database."""
        if self._closed:
            raise RecorderClosed

        def renew_and_commit() -> list[Exception | None]:
            self.lease.renew()  # before others take the replies over, since it may have expired meanwhile
            return commit()

        return await asyncio.get_running_loop().run_in_executor(self._thread, renew_and_commit)

    def _commit(self, batch: list[_WaitingTokens]) -> list[Exception | None]:
        try:
            lost = self._append(batch)
        except StoreError:
            raise
        except Exception as error:  # not the database: one reply must not fail the others
            if len(batch) == 1:
                return [error]
            return [result for frame in batch for result in self._commit([frame])]
        return [LeaseLost(one.tokens.reply_id) if one.tokens.reply_id in lost else None for one in batch]

    def _append(self, batch: list[_WaitingTokens]) -> frozenset[str]:
        try:
            return self._store.replies.append(self.lease, [frame.tokens for frame in batch])
        except TokenCountMismatch as mismatch:
            _log.warning("the database has other tokens than were stored: %d replies are mended", len(mismatch.counts))
            counts = mismatch.counts
        frames = [
            one.after(counts[one.tokens.reply_id]) if one.tokens.reply_id in counts else one.tokens for one in batch
        ]
        return self._store.replies.append(self.lease, frames)


def _resolve(batch: Sequence[_WaitingTokens], results: Sequence[Exception | None]) -> None:
    for frame, error in zip(batch, results, strict=True):
        if frame.recorded.done():  # its turn was cancelled
            continue
        if error is None:
            frame.recorded.set_result(None)
        else:
            frame.recorded.set_exception(error)
