"""`palaver replay`: a stored reply made again, and whether the tokens are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands.errors import FAILED
from palaver.commands.options import CompileOption, DeviceOption, ExactOption, ModelOption
from palaver.commands.places import DatabaseOption, DataOption, opened

if TYPE_CHECKING:
    from palaver.chat.loading import Loading
    from palaver.chat.replay import Replayed
    from palaver.store import Store


def replay(
    id: Annotated[str, typer.Argument(metavar="ID", help="The reply's id, or that of a conversation: its last reply.")],
    model: ModelOption = None,
    device: DeviceOption = None,
    exact: ExactOption = False,
    compiled: CompileOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Generate a stored reply again from its settings and seed, and say whether it is the same."""
    import asyncio

    from palaver.chat.loading import Loading

    with opened(data, database) as store:
        reply_id = _reply_id(store, id)
        made_by = store.messages.get(reply_id).reply
        name = model or (made_by.settings.model if made_by else None)
        loading = Loading(device=device, exact=exact, compiled=compiled)
        replayed = asyncio.run(_replayed(store, reply_id, name, loading))
        if replayed.same:
            print(f"the same: {len(replayed.made)} tokens")
            return
        print(
            f"different from token {replayed.difference} on: "
            f"{len(replayed.recorded)} were recorded, {len(replayed.made)} made"
        )
    raise typer.Exit(FAILED)


def _reply_id(store: Store, id: str) -> str:
    from palaver.store import NotFound

    try:
        return store.messages.get(id).id
    except NotFound:
        head = store.conversations.get(id).head_id
        if head is None:
            raise
        return head


async def _replayed(store: Store, reply_id: str, name: str | None, loading: Loading) -> Replayed:
    from palaver.chat.loading import hosted
    from palaver.chat.replay import replay as made_again
    from palaver.models.catalog import DEFAULT

    model = await hosted(loading)(name or DEFAULT, lambda *_: None)
    try:
        return await made_again(store, model, reply_id)
    finally:
        await model.engine.close()
