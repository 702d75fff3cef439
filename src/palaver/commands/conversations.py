"""`palaver conversations`, `delete` and `undelete`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands.options import DatabaseOption, DataOption, UserOption, find_owner, store_context
from palaver.errors import BadParameter

if TYPE_CHECKING:
    from palaver.store import Conversation, SearchHit, Store

IdsArgument = Annotated[
    list[str], typer.Argument(metavar="ID...", help="As `palaver conversations` shows them; their beginning is enough.")
]


def conversations(
    search: Annotated[
        str | None, typer.Option("--search", "-s", metavar="TEXT", help="Only where a title or a message has it.")
    ] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Those that were deleted.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many at most.")] = 50,
    user: UserOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """List conversations, the newest first."""
    with store_context(data, database) as store:
        if search is not None and deleted:
            raise BadParameter("--search", search, "deleted conversations are not searched; leave --deleted out")
        owner_id = find_owner(store, user)
        if search is None:
            _print_list(store.conversations.list(owner_id, limit=limit, deleted=deleted))
        else:
            _print_list(*_search(store, owner_id, search, limit))


def delete(ids: IdsArgument, data: DataOption = None, database: DatabaseOption = None) -> None:
    """Put conversations out of sight; `palaver undelete` brings them back."""
    with store_context(data, database) as store:
        for one in [store.conversations.resolve(id) for id in ids]:
            store.conversations.delete(one.id)
            print(f"{one.id} deleted: {_printable(one.title)}")


def undelete(ids: IdsArgument, data: DataOption = None, database: DatabaseOption = None) -> None:
    """Bring deleted conversations back."""
    with store_context(data, database) as store:
        for one in [store.conversations.resolve(id, deleted=True) for id in ids]:
            store.conversations.undelete(one.id)
            print(f"{one.id} is back: {_printable(one.title)}")


def _search(
    store: Store, owner_id: str, search: str, limit: int
) -> tuple[tuple[Conversation, ...], dict[str, SearchHit]]:
    """The matching conversations, each once, and the newest search hit of each."""
    hits: dict[str, SearchHit] = {}
    for hit in store.search.find(owner_id, search, limit=limit):
        hits.setdefault(hit.conversation_id, hit)
    conversations = {one.id: one for one in store.conversations.list(owner_id, title=search, limit=limit)}
    for id in hits:
        conversations.setdefault(id, store.conversations.get(id))
    newest = sorted(conversations.values(), key=lambda one: one.updated_at, reverse=True)
    return tuple(newest[:limit]), hits


def _print_list(conversations: tuple[Conversation, ...], hits: dict[str, SearchHit] | None = None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for one in conversations:
        console.print(Text.assemble(*_line(one)))
        if hits and one.id in hits:
            console.print(Text(f"    {hits[one.id].role}: {_printable(hits[one.id].snippet)}", "dim"))


def _line(one: Conversation) -> Iterator[tuple[str, str]]:
    yield one.id, "cyan"
    yield f"  {one.updated_at.astimezone():%Y-%m-%d %H:%M}  ", "dim"
    yield _printable(one.title) or "(no title)", ""
    if one.tags:
        yield f"  [{', '.join(map(_printable, one.tags))}]", "green"


def _printable(text: str) -> str:
    """Replaces characters that would control a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
