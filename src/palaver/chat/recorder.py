"""Tokens are committed before anybody hears of them: those of all turns in one transaction at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from palaver.generation import Step
from palaver.store import Lease, LeaseLost, Store, StoreError, TokenFrame
from palaver.store.token_codec import as_stored


class RecorderClosed(StoreError):
    def __init__(self) -> None:
        super().__init__("The reply could not be recorded any more: it can be continued.")


class Recorder:
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
