"""Commands on the store: `palaver conversations`, `delete`, `undelete`, `purge`, `export`, `import`, `backup`,
`restore` and `keys`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import (
    EXIT_USAGE,
    DatabaseOption,
    DataOption,
    UserOption,
    check_utf8,
    find_owner,
    media_place,
    report_errors,
    store_context,
)
from palaver.errors import BadParameter, RequestError
from palaver.repl.strings import ROLES

if TYPE_CHECKING:
    from palaver.store import Conversation, SearchHit, Store
    from palaver.store.backup import Manifest
    from palaver.store.users import Key


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
        check_utf8({"--search": search, "--user": user})
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
    from palaver.chat.engine_choice import STATES
    from palaver.engines.llamacpp.state_files import remove_states

    with store_context(data, database) as store:
        for one in [store.conversations.resolve(id) for id in ids]:
            store.conversations.delete(one.id)
            remove_states(store.folder / STATES, one.id)
            print(strings.DELETED_ONE.format(id=one.id, title=_printable(one.title) or strings.UNTITLED))


def undelete(ids: IdsArgument, data: DataOption = None, database: DatabaseOption = None) -> None:
    """Bring deleted conversations back."""
    with store_context(data, database) as store:
        for one in [store.conversations.resolve(id, deleted=True) for id in ids]:
            store.conversations.undelete(one.id)
            print(strings.UNDELETED_ONE.format(id=one.id, title=_printable(one.title) or strings.UNTITLED))


def purge(
    days: Annotated[float, typer.Option("--days", metavar="N", min=0.0, help=strings.PURGE_DAYS)] = 30.0,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Remove deleted conversations and their media for good."""
    from palaver.store.records import current_time
    from palaver.store.store import has_store

    count = 0
    if has_store(data, database):
        with store_context(data, database) as store:
            count = store.conversations.purge(current_time() - int(days * 86_400e6))
    print((strings.PURGED_ONE if count == 1 else strings.PURGED_MANY).format(count=count))


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
            hit = hits[one.id]
            line = strings.FOUND_THOUGHT if hit.in_thought else strings.FOUND
            console.print(Text(line.format(role=ROLES[hit.role], snippet=_printable(hit.snippet)), "dim"))


def _line(one: Conversation) -> Iterator[tuple[str, str]]:
    yield one.id, "cyan"
    yield f"  {one.updated_at.astimezone():%Y-%m-%d %H:%M}  ", "dim"
    yield _printable(one.title) or strings.UNTITLED, ""
    if one.tags:
        yield f"  [{', '.join(map(_printable, one.tags))}]", "green"


def _printable(text: str) -> str:
    """Replaces characters that would control a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


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
    preferences: Annotated[bool, typer.Option("--preferences", help=strings.PREFERENCES)] = False,
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
        if preferences:
            if format is not ExportFormat.JSONL:
                raise BadParameter("--as", format, strings.PREFERENCES_JSONL)
            if all_ and ids:
                raise BadParameter("CONVERSATION", " ".join(ids), strings.NAME_OR_ALL)
            _write_preferences(store, find_owner(store, user), _resolve_ids(store, ids or []), output)
            return
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


def _write_preferences(store: Store, owner_id: str, conversation_ids: Sequence[str], output: Path | None) -> None:
    """Those of the named conversations; without names, all of the user."""
    from palaver.store.blobs import atomic_file
    from palaver.transcripts.preferences import write_preferences

    file = write_preferences(store, conversation_ids or store.conversations.ids(owner_id))
    if output is None:
        sys.stdout.buffer.write(file.text.encode())
        sys.stdout.buffer.flush()
    else:
        with atomic_file(output, private=False) as out:
            out.write(file.text.encode())
    counts = strings.PREFERENCES_WRITTEN.format(pairs=f"{file.pairs:,}", skipped=f"{file.skipped:,}")
    print(counts, file=sys.stderr)


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
        found = read_file(sys.stdin.buffer.read() if file == _STDIN else file.read_bytes())
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
    """Restore a backup into an empty place. The kind of database may differ."""
    from palaver.store.backup import restore

    with report_errors():
        result = restore(file, data, database, media_place())
        print(strings.RESTORED.format(file=file, **_counts(result)))


def _counts(result: Manifest) -> dict[str, str]:
    conversations = strings.ONE_CONVERSATION if result.conversations == 1 else strings.MANY_CONVERSATIONS
    files = strings.ONE_FILE if result.blobs == 1 else strings.MANY_FILES
    return {
        "conversations": conversations.format(count=f"{result.conversations:,}"),
        "files": files.format(count=f"{result.blobs:,}"),
    }


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
