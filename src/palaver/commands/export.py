"""`palaver export` and `palaver import`: conversations to files and from files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands.options import USAGE, DatabaseOption, DataOption, UserOption, find_owner, opened_store
from palaver.errors import BadParameter, RequestError

if TYPE_CHECKING:
    from palaver.store import Conversation, Store

_STDIN = Path("-")


class ExportFormat(StrEnum):
    """What `palaver.transcripts` writes, said here again because help must not wait for the store."""

    JSONL = "jsonl"
    BRANCHES = "branches"
    TREE = "tree"
    MARKDOWN = "markdown"
    SHAREGPT = "sharegpt"


def export(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONVERSATION...", help="As `palaver conversations` shows them; a beginning is enough."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every conversation that is not deleted.")] = False,
    format: Annotated[
        ExportFormat,
        typer.Option(
            "--as",
            help="jsonl: a line for training; branches: one for each branch; tree: all there is, to be imported again.",
        ),
    ] = ExportFormat.JSONL,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Instead of stdout; several in Markdown: a folder."),
    ] = None,
    user: UserOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Write conversations for training, for reading or for another program."""
    with opened_store(data, database) as store:
        if everything == bool(ids):
            raise BadParameter("CONVERSATION", " ".join(ids or ()), "name conversations, or say --all")
        chosen = store.conversations.ids(find_owner(store, user)) if everything else _named(store, ids or [])
        if format is ExportFormat.MARKDOWN and (everything or len(chosen) > 1):
            _write_pages(store, chosen, output)
        else:
            _write(store, chosen, format, output)


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="What `palaver export` wrote, ShareGPT, an export of Open WebUI's or of llama.cpp's page; - is stdin.",
        ),
    ],
    user: UserOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Read conversations from files; the same one twice is kept once."""
    with opened_store(data, database) as store:
        whose = find_owner(store, user)
        failed = [file for file in files if not _import_one(store, whose, file)]
    if failed:
        raise typer.Exit(USAGE)


def _named(store: Store, ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(store.conversations.resolve(id).id for id in ids)


def _write(store: Store, chosen: Sequence[str], format: ExportFormat, output: Path | None) -> None:
    """To stdout as it comes; to a file that is there whole or not at all."""
    from palaver.store.blobs import whole_file

    texts = _texts(store, chosen, format)
    if output is None:
        sys.stdout.buffer.writelines(texts)
        sys.stdout.buffer.flush()
        return
    with whole_file(output, private=False) as out:
        count = sum(bool(out.write(text)) for text in texts)
    print(f"{output}: {count} of {len(chosen)} conversations written", file=sys.stderr)


def _texts(store: Store, chosen: Sequence[str], format: ExportFormat) -> Iterator[bytes]:
    """UTF-8 whatever the terminal's encoding is; a lone surrogate, which no file can hold, becomes a question mark."""
    from palaver.transcripts import TranscriptFormat, read_conversation, write_transcript

    for id in chosen:
        text = write_transcript(read_conversation(store, id), TranscriptFormat(format))
        if not text:
            print(f"palaver: {id} has no whole reply, so there is nothing to train on.", file=sys.stderr)
        yield text.encode(errors="replace")


def _write_pages(store: Store, chosen: Sequence[str], output: Path | None) -> None:
    """A page each, because a Markdown file holds one conversation."""
    if output is None or output.is_file():
        why = "must name a folder: in Markdown every conversation is a file of its own"
        raise BadParameter("--output", str(output or ""), why)
    output.mkdir(parents=True, exist_ok=True)
    for id in chosen:
        _write(store, [id], ExportFormat.MARKDOWN, output / f"{_file_name(store.conversations.get(id))}.md")


def _file_name(one: Conversation) -> str:
    words = re.sub(r"[\W_]+", "-", one.title).strip("-")[:40].strip("-")
    return f"{words}-{one.id}" if words else one.id


def _import_one(store: Store, whose: str, file: Path) -> bool:
    """Whether the file could be read; a file that can't doesn't keep the others out."""
    from palaver.transcripts import read_file, store_transcript

    try:
        found = read_file(_content(file))
    except (RequestError, OSError) as error:
        print(f"palaver: {file}: {error}", file=sys.stderr)
        return False
    for skipped in found.skipped:
        print(f"palaver: {file}: {skipped.what} was left out: {skipped.why}", file=sys.stderr)
    new = 0
    for transcript in found.transcripts:
        kept = store_transcript(store, whose, transcript)
        new += kept.new
        if kept.conversation.deleted_at is not None:
            id = kept.conversation.id
            print(f"palaver: {id} is there but deleted; `palaver undelete {id}` brings it back.", file=sys.stderr)
    print(f"{file}: {new} imported, {len(found.transcripts) - new} there already")
    return True


def _content(file: Path) -> str:
    data = sys.stdin.buffer.read() if file == _STDIN else file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadParameter("FILE", str(file), "must be UTF-8 text") from None
