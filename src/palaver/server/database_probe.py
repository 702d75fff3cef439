"""A health check of the database."""

from __future__ import annotations

import asyncio

from palaver.store import Store, StoreError

_TIMEOUT_SECONDS = 2.0


class DatabaseProbe:
    """Runs one query at a time: checks that come in meanwhile wait for the same result."""

    def __init__(self) -> None:
        self._query: asyncio.Task[None] | None = None

    async def failure(self, store: Store) -> str:
        """Why the database can't be read, or an empty string."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(asyncio.to_thread(store.check))
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await asyncio.shield(self._query)
        except TimeoutError:
            return f"The database did not answer within {_TIMEOUT_SECONDS:g} s."
        except StoreError as error:
            return str(error)
        return ""
