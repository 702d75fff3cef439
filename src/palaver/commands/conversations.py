"""`palaver conversations`, `delete` and `undelete`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import DatabaseOption, DataOption, UserOption, find_owner, report_errors, store_context
from palaver.errors import BadParameter

if TYPE_CHECKING:
    from palaver.store import Conversation, SearchHit, Store

IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help=strings.CONVERSATION_IDS)]


def conversations(
    search: Annotated[str | None, typer.Option("--search", "-s", metavar="TEXT", help=strings.SEARCH)] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help=strings.DELETED)] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help=strings.LIMIT)] = 50,
    user: UserOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """List conversations, the newest first."""
    from palaver.store.store import has_store

    with report_errors():
        if search is not None and deleted:
            raise BadParameter("--search", search, strings.NOT_SEARCHED)
    found: tuple[Conversation, ...] = ()
    if has_store(data, database):
        with store_context(data, database) as store:
            owner_id = find_owner(store, user)
            hits = None
            if search is None:
                found = store.conversations.list(owner_id, limit=limit, deleted=deleted)
            else:
                found, hits = _search(store, owner_id, search, limit)
            _print_list(found, hits)
    if not found:
        nothing = strings.NO_DELETED if deleted else strings.NO_CONVERSATIONS
        print(nothing if search is None else strings.NOTHING_FOUND.format(text=search), file=sys.stderr)


def delete(ids: IdsArgument, data: DataOption = None, database: DatabaseOption = None) -> None:
    """Put conversations out of sight; `palaver undelete` brings them back."""
    with store_context(data, database) as store:
        for one in [store.conversations.resolve(id) for id in ids]:
            store.conversations.delete(one.id)
            print(strings.DELETED_ONE.format(id=one.id, title=_printable(one.title) or strings.UNTITLED))


def undelete(ids: IdsArgument, data: DataOption = None, database: DatabaseOption = None) -> None:
    """Bring deleted conversations back."""
    with store_context(data, database) as store:
        for one in [store.conversations.resolve(id, deleted=True) for id in ids]:
            store.conversations.undelete(one.id)
            print(strings.UNDELETED_ONE.format(id=one.id, title=_printable(one.title) or strings.UNTITLED))


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
    yield _printable(one.title) or strings.UNTITLED, ""
    if one.tags:
        yield f"  [{', '.join(map(_printable, one.tags))}]", "green"


def _printable(text: str) -> str:
    """Replaces characters that would control a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
