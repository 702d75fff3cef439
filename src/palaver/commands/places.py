"""Where a command finds the conversations: the options every such command takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands.errors import errors_told

if TYPE_CHECKING:
    from palaver.store import Store

DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", envvar="PALAVER_DATA", help="Where conversations and media are kept."),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="PALAVER_DATABASE",
        help="postgresql://... to keep conversations there; a file in the data folder by default.",
    ),
]
UserOption = Annotated[str | None, typer.Option("--user", metavar="NAME", help="Whose; the local user's by default.")]


@contextmanager
def opened(data: Path | None, database: str | None) -> Iterator[Store]:
    """The store at that place, closed at the end; what goes wrong inside is told in one sentence."""
    from palaver.store import open_store

    with errors_told(), open_store(data, database) as store:
        yield store


def owner(store: Store, name: str | None) -> str:
    """The id of that user, who must be there; the local one always is."""
    return (store.users.ensure() if name is None else store.users.named(name)).id
