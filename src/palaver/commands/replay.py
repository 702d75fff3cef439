"""`palaver replay`: a stored reply made again, and whether the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from palaver.commands.options import (
    FAILED,
    CompileOption,
    DatabaseOption,
    DataOption,
    DeviceOption,
    ExactOption,
    ModelOption,
    opened_store,
)

if TYPE_CHECKING:
    from palaver.chat.model_loader import LoadOptions
    from palaver.chat.replay import ReplayResult
    from palaver.store import Store

Recorded: TypeAlias = tuple[tuple[int, str], ...]
"""The fingerprints of the engines that computed a reply, each with its first token."""


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

    from palaver.chat.model_loader import LoadOptions

    with opened_store(data, database) as store:
        reply_id = _reply_id(store, id)
        stored = store.messages.get(reply_id).reply
        made_by = stored.settings if stored else None
        name = model or (made_by.model if made_by else None)
        recorded = made_by.fingerprints if made_by else ()
        loading = _as_recorded(recorded, LoadOptions(device=device, exact=exact, compiled=compiled))
        replayed, fingerprint = asyncio.run(_replayed(store, reply_id, name, loading))
        for line in _engines(recorded, fingerprint):
            print(line)
        if replayed.same:
            print(f"the same: {len(replayed.made)} tokens")
            return
        print(
            f"different from token {replayed.difference} on: "
            f"{len(replayed.recorded)} were recorded, {len(replayed.made)} made"
        )
    raise typer.Exit(FAILED)


def _as_recorded(recorded: Recorded, asked: LoadOptions) -> LoadOptions:
    """Loads the model as it was loaded for the reply, as far as this machine can and the flags leave it open."""
    from dataclasses import replace

    from palaver.engines.base import BATCHED, COMPILED_RUNNER, Fingerprint

    before = Fingerprint.parse(recorded[0][1]) if recorded else None
    if before is None:
        return asked
    compiled = before.runner == COMPILED_RUNNER
    return replace(
        asked,
        device=asked.device or ("cpu" if before.device == "cpu" else None),
        dtype=asked.dtype or (before.dtype if before.device == "cpu" else None),
        exact=asked.exact or (before.exactness != BATCHED and not compiled),
        compiled=asked.compiled if asked.compiled is not None or compiled else False,
    )


def _engines(recorded: Recorded, fingerprint: str) -> Iterator[str]:
    if not recorded:
        yield "computed by an engine that was not recorded"
    for start, one in recorded:
        yield f"computed by {one}" + (f", from token {start} on" if start else "")
    same = len(recorded) == 1 and recorded[0] == (0, fingerprint)
    yield f"replayed by {'the same' if same else fingerprint}"


def _reply_id(store: Store, id: str) -> str:
    from palaver.store import NotFound

    try:
        return store.messages.get(id).id
    except NotFound:
        head = store.conversations.get(id).head_id
        if head is None:
            raise
        return head


async def _replayed(store: Store, reply_id: str, name: str | None, loading: LoadOptions) -> tuple[ReplayResult, str]:
    """What came of it, and the fingerprint of the engine that made it now."""
    from palaver.chat.model_loader import hosted_loader
    from palaver.chat.replay import replay as made_again
    from palaver.models.catalog import DEFAULT

    model = await hosted_loader(loading)(name or DEFAULT, lambda *_: None)
    try:
        return await made_again(store, model, reply_id), model.engine.info.fingerprint
    finally:
        await model.engine.close()
