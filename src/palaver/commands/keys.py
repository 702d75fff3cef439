"""`palaver keys`: API keys of a server's users. Every user has separate conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands.options import DatabaseOption, DataOption, store_context

if TYPE_CHECKING:
    from palaver.store.users import Key

keys = typer.Typer(help="Keys of a server's users.", no_args_is_help=True)


@keys.command()
def add(
    user: Annotated[str, typer.Argument(metavar="NAME", help="Whose; made where there is no such user.")],
    admin: Annotated[bool, typer.Option("--admin", help="May load and unload models, too.")] = False,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Make a key. It is shown once: only a digest of it is kept."""
    with store_context(data, database) as store:
        _, text = store.keys.add(store.users.ensure(user).id, admin)
        print(text)


@keys.command("list")
def list_(data: DataOption = None, database: DatabaseOption = None) -> None:
    """Show which keys there are, not what they are."""
    with store_context(data, database) as store:
        for key in store.keys.all():
            print(_format_key(key))


@keys.command()
def revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As `palaver keys list` shows them.")],
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Make keys worthless; a running server takes notice within seconds."""
    with store_context(data, database) as store:
        for key in [store.keys.get(id) for id in ids]:
            print(_format_key(store.keys.revoke(key.id)))


def _format_key(key: Key) -> str:
    rights = "admin" if key.admin else "user"
    state = f"revoked {key.revoked_at.astimezone():%Y-%m-%d %H:%M}" if key.revoked_at else "valid"
    return f"{key.id}  {key.created_at.astimezone():%Y-%m-%d %H:%M}  {rights:5}  {state}  {key.user}"
