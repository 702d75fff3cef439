"""`palaver backup` and `palaver restore`: the whole store as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import DatabaseOption, DataOption, report_errors, store_context

if TYPE_CHECKING:
    from palaver.store.backup import Manifest


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=strings.BACKUP_FILE)],
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Write all conversations and their media into one file, also while they are in use."""
    with store_context(data, database) as store:
        from palaver.store.backup import backup

        result = backup(store, file)
        size = f"{file.stat().st_size:,}"
        print(strings.BACKED_UP.format(file=file, size=size, **_counts(result)))


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=strings.RESTORE_FILE)],
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Fill an empty place from a backup, whichever kind of database it was made from."""
    from palaver.store.backup import restore

    with report_errors():
        result = restore(file, data, database)
        print(strings.RESTORED.format(file=file, **_counts(result)))


def _counts(result: Manifest) -> dict[str, str]:
    conversations = strings.ONE_CONVERSATION if result.conversations == 1 else strings.MANY_CONVERSATIONS
    files = strings.ONE_FILE if result.blobs == 1 else strings.MANY_FILES
    return {
        "conversations": conversations.format(count=f"{result.conversations:,}"),
        "files": files.format(count=f"{result.blobs:,}"),
    }
