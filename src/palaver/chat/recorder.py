"""Tokens are committed before anybody hears of them: those of all turns in one transaction at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from palaver.errors import PalaverError
from palaver.generation import Step
from palaver.store import Lease, LeaseLost, Piece, Store
from palaver.store.tokens import as_stored


class Recorder:
    """While one transaction is under way the next one gathers, so that a slow disk makes larger ones."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting: list[tuple[Piece, asyncio.Future[Step]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def keep(self, reply_id: str, place: int, step: Step) -> Step:
        """Gives the step as it is stored, once it is. Raises what the store raised, LeaseLost among it."""
        kept: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._waiting.append((Piece(reply_id, place, (step,)), kept))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await kept

    def close(self) -> None:
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # the other turns of the same engine frame put theirs in too
            batch, self._waiting = self._waiting, []
            try:
                kept = await loop.run_in_executor(self._thread, self._commit, [piece for piece, _ in batch])
            except PalaverError as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                _answer(batch, kept)

    def _commit(self, pieces: list[Piece]) -> list[Step | None]:
        lost = self._store.replies.append(self._lease, pieces)
        return [None if piece.reply_id in lost else as_stored(piece.steps[0]) for piece in pieces]


def _answer(batch: list[tuple[Piece, asyncio.Future[Step]]], kept: list[Step | None]) -> None:
    for (piece, future), step in zip(batch, kept, strict=True):
        if future.done():  # nobody waits any more
            continue
        if step is None:
            future.set_exception(LeaseLost(piece.reply_id))
        else:
            future.set_result(step)
