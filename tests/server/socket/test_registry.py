"""How long turns stay in memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass

import pytest

from palaver.server.socket import registry
from palaver.server.socket.registry import SocketRegistry, SocketTurn
from palaver.store import NotFound


@dataclass
class Producer:
    """Ends the turn with one message."""

    turn: SocketTurn

    async def run(self) -> None:
        self.turn.log.add({"type": "done"}, last=True)

    def stop(self) -> None:
        """It has ended."""


async def start_turn(sockets: SocketRegistry) -> tuple[weakref.ref[SocketTurn], str]:
    """Runs a turn to its end."""
    turn = SocketTurn("ann")
    sockets.start(turn, Producer(turn))  # type: ignore[arg-type]
    async for _ in turn.log.read():
        pass
    return weakref.ref(turn), turn.id


async def test_a_turn_that_is_dropped_early_leaves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = SocketRegistry(grace=60, max_sockets=1)
    first, first_id = await start_turn(sockets)
    assert sockets.turn("ann", first_id) is first()
    monkeypatch.setattr(registry, "MAX_RETAINED_SIZE", 0)
    second, _ = await start_turn(sockets)
    async with asyncio.timeout(60):
        while first() or second():
            await asyncio.sleep(0)
            gc.collect()
    with pytest.raises(NotFound):
        sockets.turn("ann", first_id)
