"""A stored response while it runs: it counts among the replies that may run at once, and is remembered when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

from palaver.chat.interface import Chat
from palaver.errors import PalaverError
from palaver.server.state import State
from palaver.store import ReplyStatus, StoredMessage


async def attended(
    state: State, chat: Chat, owner: str, begin: Callable[[], Awaitable[StoredMessage]]
) -> StoredMessage:
    """The reply, begun. QueueFull or ShuttingDown, and nothing begun, where there is no room for it."""
    with ExitStack() as floor:
        floor.enter_context(state.floor.taken(owner, _put_aside))
        reply = await begin()
        if reply.id in state.attending or reply.reply is None or reply.reply.status is not ReplyStatus.RUNNING:
            return reply  # it was asked for before, under the same key
        task = asyncio.create_task(_attend(state, chat, owner, reply.id, floor.pop_all()))
    state.attending[reply.id] = task
    task.add_done_callback(lambda _: state.attending.pop(reply.id, None))
    return reply


async def attended_to(state: State, reply: str) -> None:
    """Waits until a response that has ended is remembered: whoever hears of its end may go on from it at once."""
    if (task := state.attending.get(reply)) is not None:
        await asyncio.wait({task})


def _put_aside() -> None:
    """With the server's end all turns are put aside: nothing has to be stopped for that."""


async def _attend(state: State, chat: Chat, owner: str, reply: str, floor: ExitStack) -> None:
    with suppress(PalaverError):  # its conversation may be deleted meanwhile
        with floor:
            async with chat.events(reply) as entries:
                async for _ in entries:
                    pass
        path = await chat.path(reply)
        branch = await asyncio.to_thread(state.service.store.messages.full_path, path)
        state.branches.keep(owner, branch, reply)
