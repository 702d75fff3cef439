"""Backups: a whole store as one file, and restoring it.

The file is a zip archive: a manifest, the database (SQLite's own file, or every row as JSON) and the blobs. A backup is
consistent while the store is in use, is written atomically, and can be restored into either kind of database."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import secrets
import sqlite3
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, MetaData, Table, delete, func, insert, select, text, update

from palaver.store.blobs import Blobs, atomic_file, open_blobs, private_opener, sync_folder
from palaver.store.database import Database
from palaver.store.errors import BadBackup, Damaged, NotEmpty, translate_errors
from palaver.store.migrations import current_revision, migrate
from palaver.store.schema import HEAD, conversations, holders, message_blobs, users
from palaver.store.search import rebuild
from palaver.store.store import BLOBS, DATABASE, Store, data_folder, database_url, open_store

_FORMAT = "palaver backup"
_MANIFEST = "manifest.json"
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Manifest:
    revision: str
    tables: tuple[str, ...]
    """Empty if the archive holds SQLite's own file."""
    blobs: int
    conversations: int
    """Includes deleted ones."""


def backup(store: Store, file: Path) -> Manifest:
    """Writes the whole store into a new file. The store may be in use meanwhile."""
    with translate_errors(), _new_archive(file) as archive:
        contents = _add_database(archive, store.database)
        for digest in contents.digests:
            archive.writestr(f"blobs/{digest}", store.blobs.get(digest), zipfile.ZIP_STORED)
        manifest = Manifest(HEAD, contents.tables, len(contents.digests), contents.conversations)
        archive.writestr(_MANIFEST, json.dumps({"format": _FORMAT, **asdict(manifest)}))
    return manifest


def restore(
    file: Path, folder: Path | None = None, database: str | URL | None = None, blobs: str | None = None
) -> Manifest:
    """Restores a backup into an empty store and migrates its schema. Raises NotEmpty if the target has content."""
    with translate_errors(), _open_archive(file) as archive:
        manifest = _read_manifest(archive)
        target_folder = data_folder(folder)
        with closing(Database(database_url(target_folder, database))) as target:
            _check_empty(target)
            _restore_blobs(archive, open_blobs(target_folder / BLOBS, blobs))
            _restore_database(archive, manifest, target)
        with open_store(target_folder, database, blobs=blobs) as store:
            _expire_holders(store)
            with store.database.read_transaction() as connection:
                return replace(manifest, conversations=_count_conversations(connection))


@contextmanager
def _new_archive(file: Path) -> Iterator[zipfile.ZipFile]:
    """A new archive that appears under its name when it is complete and synced."""
    if file.exists():
        raise NotEmpty(f"The file {str(file)!r} already exists: choose another name.")
    with atomic_file(file) as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        yield archive


@dataclass(frozen=True, slots=True)
class _Contents:
    tables: tuple[str, ...]
    digests: tuple[str, ...]
    """The blobs that messages reference."""
    conversations: int


def _add_database(archive: zipfile.ZipFile, database: Database) -> _Contents:
    if database.is_sqlite:
        return _add_sqlite_file(archive, database)
    with database.snapshot() as connection:
        tables = reflect_tables(connection)
        for table in tables:
            with archive.open(f"rows/{table.name}.jsonl", "w", force_zip64=True) as out:
                for line in dump_rows(connection, table):
                    out.write(line.encode())
        return _describe(connection, [table.name for table in tables])


def _add_sqlite_file(archive: zipfile.ZipFile, database: Database) -> _Contents:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        with database.read_transaction() as connection, closing(sqlite3.connect(copy)) as target:
            source: Any = connection.connection.driver_connection
            source.backup(target)
        archive.write(copy, DATABASE)
        with closing(Database(database_url(Path(folder)))) as copied, copied.read_transaction() as connection:
            return _describe(connection)


def _describe(connection: Connection, tables: Sequence[str] = ()) -> _Contents:
    digests = connection.execute(select(message_blobs.c.digest).distinct()).scalars()
    return _Contents(tuple(tables), tuple(digests), _count_conversations(connection))


def _count_conversations(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(conversations)).scalar_one()


@contextmanager
def _open_archive(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except FileNotFoundError:
        raise BadBackup(f"There is no file {str(file)!r}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise BadBackup(f"The file {str(file)!r} is not a complete backup: {error}.") from error


def _read_manifest(archive: zipfile.ZipFile) -> Manifest:
    try:
        content = json.loads(archive.read(_MANIFEST))
        if content["format"] != _FORMAT:
            raise KeyError(_FORMAT)
        counts = content["blobs"], content.get("conversations", 0)
        manifest = Manifest(content["revision"], tuple(content["tables"]), *counts)
    except (KeyError, ValueError):
        raise BadBackup("The file is not a Palaver backup: it has no manifest.") from None
    if manifest.revision > HEAD:
        raise BadBackup("The backup was made by a newer version of Palaver: update Palaver first.")
    return manifest


def _check_empty(target: Database) -> None:
    """Raises NotEmpty if the target has content. A store without conversations counts as empty."""
    if _is_new(target):
        return
    current = current_revision(target)
    with target.read_transaction() as connection:
        in_use = current is None or any(_has_rows(connection, table) for table in reflect_tables(connection))
    if in_use:
        raise NotEmpty(f"There is already a store at {target.url.render_as_string()!r}: choose an empty place.")


def _has_rows(connection: Connection, table: Table) -> bool:
    """Users and holders exist as soon as a store was opened, and rates as soon as it was served: they do not count."""
    return (
        table.name not in ("users", "holders", "rate_limits")
        and connection.execute(select(table).limit(1)).first() is not None
    )


def _is_new(target: Database) -> bool:
    return not target.path.exists() if target.is_sqlite else current_revision(target) is None


def _restore_database(archive: zipfile.ZipFile, manifest: Manifest, target: Database) -> None:
    if not _is_new(target):
        _convert(archive, manifest, target)
    elif manifest.tables:
        _restore_rows(archive, manifest, target)
    elif target.is_sqlite:
        _install_sqlite_file(archive, target)
    else:
        _convert(archive, manifest, target)


def _restore_blobs(archive: zipfile.ZipFile, blobs: Blobs) -> None:
    for name in archive.namelist():
        if name.startswith("blobs/"):
            data = archive.read(name)
            if hashlib.sha256(data).hexdigest() != name.removeprefix("blobs/"):
                raise BadBackup(f"The backup is damaged: {name!r} has changed since it was written.")
            blobs.put(data)


def _install_sqlite_file(archive: zipfile.ZipFile, target: Database) -> None:
    temporary = target.path.with_name(f".{target.path.name}.{secrets.token_hex(4)}")
    try:
        _extract(archive, temporary)
        temporary.replace(target.path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.path.parent)


def _extract(archive: zipfile.ZipFile, to: Path) -> None:
    with archive.open(DATABASE) as source, open(to, "xb", opener=private_opener) as out:
        while piece := source.read(1 << 20):
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    with closing(sqlite3.connect(to)) as connection:
        try:
            intact = connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        except sqlite3.DatabaseError:
            intact = False
        if not intact:
            raise Damaged("The database in the backup is damaged.")


def _restore_rows(archive: zipfile.ZipFile, manifest: Manifest, target: Database) -> None:
    migrate(target, manifest.revision)
    with target.write_transaction() as connection:
        for table in reflect_tables(connection):
            with archive.open(f"rows/{table.name}.jsonl") as raw:
                load_rows(connection, table, io.TextIOWrapper(raw, "utf-8"))
        advance_sequence(connection)
    _upgrade(target)


def _convert(archive: zipfile.ZipFile, manifest: Manifest, target: Database) -> None:
    """Copies row by row, into another kind of database or one that has its schema already."""
    with tempfile.TemporaryDirectory() as folder:
        with closing(Database(database_url(Path(folder)))) as unpacked:
            _restore_database(archive, manifest, unpacked)
        with open_store(Path(folder)) as source:
            migrate(target)
            with source.database.read_transaction() as old, target.write_transaction() as new:
                new.execute(delete(users))
                tables = {table.name: table for table in reflect_tables(old)}
                for table in reflect_tables(new):
                    load_rows(new, table, dump_rows(old, tables[table.name]))
                advance_sequence(new)
    _upgrade(target)


def _upgrade(target: Database) -> None:
    migrate(target)
    with target.write_transaction() as connection:
        rebuild(connection)


def _expire_holders(store: Store) -> None:
    """Expires the leases of the backup's processes and interrupts their running replies."""
    with store.database.write_transaction() as connection:
        connection.execute(update(holders).values(expires_at=0))
    store.replies.interrupt_orphans()


def reflect_tables(connection: Connection) -> list[Table]:
    """The tables of this database, parents first, without the search index, which is rebuilt."""
    found = MetaData()
    found.reflect(connection, only=lambda name, _: not name.startswith(("search_", "alembic_")))
    return list(found.sorted_tables)


def dump_rows(connection: Connection, table: Table) -> Iterator[str]:
    """One line per row, in primary key order: a message comes after its parent."""
    rows = connection.execution_options(yield_per=_BATCH).execute(select(table).order_by(*table.primary_key))
    for row in rows.mappings():
        yield json.dumps({name: _encode_value(value) for name, value in row.items()}) + "\n"


def load_rows(connection: Connection, table: Table, lines: Iterable[str]) -> int:
    """Inserts the rows and returns how many."""
    values = ({name: _decode_value(value) for name, value in json.loads(line).items()} for line in lines)
    count = 0
    while batch := list(islice(values, _BATCH)):
        connection.execute(insert(table), batch)
        count += len(batch)
    return count


def advance_sequence(connection: Connection) -> None:
    """Sets PostgreSQL's sequence behind the restored rows."""
    if connection.dialect.name == "postgresql":
        connection.execute(
            text("SELECT setval(pg_get_serial_sequence('messages', 'seq'), coalesce(max(seq), 1)) FROM messages")
        )


def _encode_value(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode_value(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
