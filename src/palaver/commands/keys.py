"""`palaver keys`: API keys of a server's users. Every user has separate conversations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import DatabaseOption, DataOption, store_context

if TYPE_CHECKING:
    from palaver.store.users import Key

keys = typer.Typer(help=strings.KEYS, no_args_is_help=True)


@keys.command(help=strings.KEYS_ADD)
def add(
    user: Annotated[str, typer.Argument(metavar="NAME", help=strings.KEY_USER)],
    admin: Annotated[bool, typer.Option("--admin", help=strings.KEY_ADMIN)] = False,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Make a key. It is shown once: only a digest of it is kept."""
    with store_context(data, database) as store:
        _, text = store.keys.add(store.users.ensure(user).id, admin)
        print(text)


@keys.command("list", help=strings.KEYS_LIST)
def list_(data: DataOption = None, database: DatabaseOption = None) -> None:
    """Show which keys there are, not what they are."""
    from palaver.store.store import has_store

    found: tuple[Key, ...] = ()
    if has_store(data, database):
        with store_context(data, database) as store:
            found = tuple(store.keys.all())
    for key in found:
        print(_format_key(key))
    if not found:
        print(strings.NO_KEYS, file=sys.stderr)


@keys.command(help=strings.KEYS_REVOKE)
def revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help=strings.KEY_IDS)],
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Make keys worthless; a running server takes notice within seconds."""
    with store_context(data, database) as store:
        for key in [store.keys.get(id) for id in ids]:
            print(_format_key(store.keys.revoke(key.id)))


def _format_key(key: Key) -> str:
    rights = strings.KEY_RIGHTS_ADMIN if key.admin else strings.KEY_RIGHTS_USER
    state = strings.KEY_VALID
    if key.revoked_at:
        state = strings.KEY_REVOKED.format(time=f"{key.revoked_at.astimezone():%Y-%m-%d %H:%M}")
    return f"{key.id}  {key.created_at.astimezone():%Y-%m-%d %H:%M}  {rights:5}  {state}  {key.user}"
