"""Faults put into a running service: at the n-th call of what a turn uses, or at the n-th await of its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any

import sqlalchemy.exc

KINDS: tuple[Callable[[], Exception], ...] = (
    lambda: RuntimeError("a fault"),
    lambda: OSError(5, "a fault"),
    lambda: sqlalchemy.exc.OperationalError("SELECT 1", {}, Exception("a fault")),
    lambda: TimeoutError("a fault"),
    lambda: MemoryError("a fault"),
)
"""Ordinary exceptions, none of them a PalaverError."""


class Faults:
    """Counts the places where a fault may come from now on, and raises one at the n-th."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._kind: Callable[[], BaseException] = KINDS[0]
        self.raised: BaseException | None = None

    def arm(self, place: int, kind: Callable[[], BaseException]) -> None:
        """The fault comes at that place; the first is 0."""
        self._left, self._kind, self.raised = place, kind, None

    def disarm(self) -> None:
        self._left = None

    def due(self) -> BaseException | None:
        """The fault, where this is its place."""
        if self._left is None:
            return None
        self._left -= 1
        if self._left >= 0:
            return None
        self._left = None
        self.raised = self._kind()
        return self.raised

    def strike(self) -> None:
        if (fault := self.due()) is not None:
            raise fault

    def around(self, thing: Any, names: Iterable[str], after: bool) -> None:
        """Faults before the calls of these methods of `thing`, or after they have done what they do."""
        for name in names:
            setattr(thing, name, self._striking(getattr(thing, name), after))

    def _striking(self, method: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            if not after:
                self.strike()
            result = method(*values, **named)
            if after:
                self.strike()
            return result

        return call


class Throwing(Coroutine[Any, Any, Any]):
    """A coroutine that finds a fault where it waits: what it waited for is done, and its result is lost."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], faults: Faults) -> None:
        self._coroutine = coroutine
        self._faults = faults
        self._begun = False

    def send(self, value: Any) -> Any:
        fault = self._faults.due() if self._begun else None
        self._begun = True
        return self._coroutine.send(value) if fault is None else self._coroutine.throw(fault)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("only a task drives it")


def throw_at_awaits(faults: Faults, folder: str) -> None:
    """Every task of this loop whose coroutine is written in that folder may find a fault from now on."""

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        code = getattr(coroutine, "cr_code", None)
        if code is not None and folder in code.co_filename:
            coroutine = Throwing(coroutine, faults)
        return asyncio.Task(coroutine, loop=loop, **named)

    asyncio.get_running_loop().set_task_factory(factory)
