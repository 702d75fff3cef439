"""Whether the database answers, without a thread for each question."""

from __future__ import annotations

import asyncio

from palaver.store import Store, StoreError

_SECONDS = 2.0


class DatabaseProbe:
    """Asks the database once at a time: who asks meanwhile waits for the same answer."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[None] | None = None

    async def failure(self, store: Store) -> str:
        """Why the database can't be read, or an empty string."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(store.check))
        try:
            async with asyncio.timeout(_SECONDS):
                await asyncio.shield(self._asking)
        except TimeoutError:
            return f"The database did not answer within {_SECONDS:g} s."
        except StoreError as error:
            return str(error)
        return ""
