"""The events of one turn, numbered, and its readers, who come and go.

Only what is read from tokens has a number, so that a number means the same after any crash: event n is always made
of the same tokens. How the turn stands just now (waiting, started, ended) is told to every reader beside that, and
told again to whoever comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from palaver.errors import BadParameter
from palaver.events import Event, Failed, Finished, Folded, ReadEvent, Snapshot, Started, Waiting, fold
from palaver.generation import Step
from palaver.store import Lease, LeaseLost, Store, StoreError, TokenFrame
from palaver.store.token_codec import as_stored


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`number` counts the numbered events up to here: whoever comes back asks for what is after it."""

    number: int
    event: Event


class TurnLog:
    """Append-only. Readers never slow the writer: each has its own place in the list."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: list[ReadEvent] = []
        self._snapshot: Snapshot | None = None
        self._standing: Waiting | Started | None = None
        self._ending: Finished | Failed | None = None
        self._changed = asyncio.Event()
        for event in events:
            self.tell(event)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def ended(self) -> bool:
        return self._ending is not None

    @property
    def started(self) -> bool:
        """Whether the turn has left the queue."""
        return isinstance(self._standing, Started)

    def tell(self, event: Event) -> None:
        match event:
            case Waiting() | Started():
                self._standing = event
            case Finished() | Failed():
                self._ending = event
            case Snapshot():
                self._snapshot = event
            case _:
                self._events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def folded(self, ending: Finished | Failed | None = None) -> Folded:
        """What was said so far, ended as told."""
        return fold([*self._events, *((ending,) if ending else ())])

    def so_far(self, after: int = 0) -> list[LogEntry]:
        """What there is after that number, without waiting."""
        return [LogEntry(place + 1, self._events[place]) for place in range(after, len(self))]

    async def reaches(self, after: int) -> None:
        """Waits until all is known that was ever told of the turn. BadParameter for a number beyond that."""
        while after > len(self) and not (self.ended or self.started):  # taken up again: what it said is being read
            await self._changed.wait()
        self.check(after)

    def check(self, after: int) -> None:
        """BadParameter for a number that was not told yet; who gets a snapshot may have had any."""
        if self._snapshot is None and not 0 <= after <= len(self):
            raise BadParameter("after", after, f"the turn has {len(self)} events")

    async def read(self, after: int = 0) -> AsyncGenerator[LogEntry]:
        """Everything after that number, as it comes, to the end of the turn."""
        await self.reaches(after)
        at, told = after, None
        if self._snapshot is not None:
            yield LogEntry(at, self._snapshot)
        while True:
            changed = self._changed
            if self._standing is not told:
                told = self._standing
                assert told is not None
                yield LogEntry(at, told)
            while at < len(self):
                at += 1
                yield LogEntry(at, self._events[at - 1])
            if self._ending is not None:
                yield LogEntry(at, self._ending)
                return
            await changed.wait()


class RecorderClosed(StoreError):
    def __init__(self) -> None:
        super().__init__("The reply could not be recorded any more: it can be continued.")


class TokenRecorder:
    """While one transaction is under way the next one gathers, so that a slow disk makes larger ones."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self.lease = lease
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting: list[tuple[TokenFrame, asyncio.Future[Step]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def keep(self, reply_id: str, place: int, step: Step) -> Step:
        """Gives the step as it is stored, once it is. Raises whatever writing it raised, LeaseLost among it."""
        kept: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._waiting.append((TokenFrame(reply_id, place, (step,)), kept))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await kept

    def close(self) -> None:
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch: list[tuple[TokenFrame, asyncio.Future[Step]]] = []
            try:
                await asyncio.sleep(0)  # the other turns of the same engine frame put theirs in too
                batch, self._waiting = self._waiting, []
                pieces = [piece for piece, _ in batch]
                _answer(batch, await loop.run_in_executor(self._thread, self._commit, pieces))
            except Exception as error:
                _answer(batch, [error] * len(batch))
            except BaseException:  # this task was cancelled: nothing is written any more
                batch += self._waiting
                self._waiting = []
                _answer(batch, [RecorderClosed()] * len(batch))
                raise

    def _commit(self, pieces: list[TokenFrame]) -> list[Step | Exception]:
        try:
            lost = self._store.replies.append(self.lease, pieces)
        except StoreError:
            raise
        except Exception as error:  # not the database: one reply's tokens must not fail those of the others
            if len(pieces) == 1:
                return [error]
            return [kept for piece in pieces for kept in self._commit([piece])]
        return [LeaseLost(piece.reply_id) if piece.reply_id in lost else as_stored(piece.steps[0]) for piece in pieces]


def _answer(batch: list[tuple[TokenFrame, asyncio.Future[Step]]], kept: Sequence[Step | Exception]) -> None:
    for (_, future), step in zip(batch, kept, strict=True):
        if future.done():  # nobody waits any more
            continue
        if isinstance(step, Step):
            future.set_result(step)
        else:
            future.set_exception(step)
