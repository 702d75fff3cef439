"""`palaver export` and `palaver import`: conversations to files and from files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import EXIT_USAGE, DatabaseOption, DataOption, UserOption, find_owner, store_context
from palaver.errors import BadParameter, RequestError

if TYPE_CHECKING:
    from palaver.store import Conversation, Store

_STDIN = Path("-")


class ExportFormat(StrEnum):
    """The formats of `palaver.transcripts`, repeated here so that help does not import the store."""

    JSONL = "jsonl"
    BRANCHES = "branches"
    TREE = "tree"
    MARKDOWN = "markdown"
    SHAREGPT = "sharegpt"


def export(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONVERSATION...", help=strings.CONVERSATION_IDS),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help=strings.ALL)] = False,
    format: Annotated[
        ExportFormat,
        typer.Option(
            "--as",
            help=strings.EXPORT_FORMAT,
        ),
    ] = ExportFormat.JSONL,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help=strings.OUTPUT),
    ] = None,
    user: UserOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Write conversations for training, for reading or for another program."""
    with store_context(data, database) as store:
        if all_ == bool(ids):
            raise BadParameter("CONVERSATION", " ".join(ids or ()), strings.NAME_OR_ALL)
        conversation_ids = store.conversations.ids(find_owner(store, user)) if all_ else _resolve_ids(store, ids or [])
        if format is ExportFormat.MARKDOWN and (all_ or len(conversation_ids) > 1):
            _write_pages(store, conversation_ids, output)
        else:
            _write(store, conversation_ids, format, output)


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=strings.IMPORT_FILES,
        ),
    ],
    user: UserOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Read conversations from files; the same one twice is kept once."""
    with store_context(data, database) as store:
        owner_id = find_owner(store, user)
        failed = [file for file in files if not _import_file(store, owner_id, file)]
    if failed:
        raise typer.Exit(EXIT_USAGE)


def _resolve_ids(store: Store, ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(store.conversations.resolve(id).id for id in ids)


def _write(store: Store, conversation_ids: Sequence[str], format: ExportFormat, output: Path | None) -> None:
    """Streams to stdout, or writes a file atomically."""
    from palaver.store.blobs import atomic_file

    texts = _encode(store, conversation_ids, format)
    if output is None:
        sys.stdout.buffer.writelines(texts)
        sys.stdout.buffer.flush()
        return
    with atomic_file(output, private=False) as out:
        count = sum(bool(out.write(text)) for text in texts)
    total = strings.ONE_CONVERSATION if len(conversation_ids) == 1 else strings.MANY_CONVERSATIONS
    conversations = total.format(count=f"{len(conversation_ids):,}")
    print(strings.EXPORTED.format(file=output, count=f"{count:,}", conversations=conversations), file=sys.stderr)


def _encode(store: Store, conversation_ids: Sequence[str], format: ExportFormat) -> Iterator[bytes]:
    """Each conversation as UTF-8, independent of the terminal's encoding. Lone surrogates become question marks."""
    from palaver.transcripts import TranscriptFormat, read_conversation, write_transcript

    for id in conversation_ids:
        text = write_transcript(read_conversation(store, id), TranscriptFormat(format))
        if not text:
            print(f"palaver: {strings.NOTHING_TO_EXPORT.format(id=id)}", file=sys.stderr)
        yield text.encode(errors="replace")


def _write_pages(store: Store, conversation_ids: Sequence[str], output: Path | None) -> None:
    """Writes one Markdown file per conversation."""
    if output is None or output.is_file():
        raise BadParameter("--output", str(output or ""), strings.OUTPUT_FOLDER)
    output.mkdir(parents=True, exist_ok=True)
    for id in conversation_ids:
        _write(store, [id], ExportFormat.MARKDOWN, output / f"{_file_name(store.conversations.get(id))}.md")


def _file_name(one: Conversation) -> str:
    words = re.sub(r"[\W_]+", "-", one.title).strip("-")[:40].strip("-")
    return f"{words}-{one.id}" if words else one.id


def _import_file(store: Store, owner_id: str, file: Path) -> bool:
    """Imports one file. Returns False if it can't be read, so that the other files are still imported."""
    from palaver.transcripts import read_file, store_transcript

    try:
        found = read_file(_read_text(file))
    except (RequestError, OSError) as error:
        print(f"palaver: {file}: {error}", file=sys.stderr)
        return False
    for skipped in found.skipped:
        text = strings.SKIPPED.format(file=file, item=skipped.item, reason=skipped.reason)
        print(f"palaver: {text}", file=sys.stderr)
    new = 0
    for transcript in found.transcripts:
        stored = store_transcript(store, owner_id, transcript)
        new += stored.new
        if stored.conversation.deleted_at is not None:
            text = strings.IMPORTED_DELETED.format(id=stored.conversation.id)
            print(f"palaver: {text}", file=sys.stderr)
    known = len(found.transcripts) - new
    print(strings.IMPORTED.format(file=file, new=f"{new:,}", known=f"{known:,}"))
    return True


def _read_text(file: Path) -> str:
    data = sys.stdin.buffer.read() if file == _STDIN else file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadParameter("FILE", str(file), strings.NOT_UTF8) from None
