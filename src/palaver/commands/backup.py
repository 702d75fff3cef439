"""`palaver backup` and `palaver restore`: the whole store as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palaver.commands.options import DatabaseOption, DataOption, report_errors, store_context


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must not be there yet.")],
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Write all conversations and their media into one file, also while they are in use."""
    with store_context(data, database) as store:
        from palaver.store.backup import backup

        result = backup(store, file)
        print(f"{file}: {file.stat().st_size:,} bytes, {_count(result.conversations)}, {result.blobs} media files")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `palaver backup` has written.")],
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Fill an empty place from a backup, whichever kind of database it was made from."""
    from palaver.store.backup import restore

    with report_errors():
        result = restore(file, data, database)
        print(f"{_count(result.conversations)} and {result.blobs} media files restored from {file}")


def _count(conversations: int) -> str:
    return f"{conversations} conversation{'' if conversations == 1 else 's'}"
