"""A whole store as one file, and back.

The file is a zip archive: a manifest, the database (SQLite's own file, or every row as JSON) and the blobs. It is
made while the store is in use, is there whole or not at all, and can be restored into either kind of database."""

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

from palaver.store.blobs import Blobs, private_opener, sync_folder, whole_file
from palaver.store.database import Database
from palaver.store.errors import BadBackup, Damaged, NotEmpty, translated
from palaver.store.migrations import current_revision, migrate
from palaver.store.schema import HEAD, conversations, holders, message_blobs, users
from palaver.store.search_index import rebuild
from palaver.store.store import DATABASE, Store, data_folder, database_url, open_store

_BATCH = 500


def reflect_tables(connection: Connection) -> list[Table]:
    """The tables as they are in this database, parents first; not the index, which is made anew."""
    found = MetaData()
    found.reflect(connection, only=lambda name, _: not name.startswith(("search_", "alembic_")))
    return list(found.sorted_tables)


def dump_rows(connection: Connection, table: Table) -> Iterator[str]:
    """One line a row, in the order of the key: a message comes after its parent."""
    rows = connection.execution_options(yield_per=_BATCH).execute(select(table).order_by(*table.primary_key))
    for row in rows.mappings():
        yield json.dumps({name: _plain(value) for name, value in row.items()}) + "\n"


def load_rows(connection: Connection, table: Table, lines: Iterable[str]) -> int:
    """Inserts the rows; says how many."""
    values = ({name: _value(value) for name, value in json.loads(line).items()} for line in lines)
    count = 0
    while batch := list(islice(values, _BATCH)):
        connection.execute(insert(table), batch)
        count += len(batch)
    return count


def count_on(connection: Connection) -> None:
    """PostgreSQL's counter goes on after the rows that came with a number."""
    if connection.dialect.name == "postgresql":
        connection.execute(
            text("SELECT setval(pg_get_serial_sequence('messages', 'seq'), coalesce(max(seq), 1)) FROM messages")
        )


def _plain(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _value(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value


_FORMAT = "palaver backup"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    revision: str
    tables: tuple[str, ...]
    """Empty where the database is SQLite's own file."""
    blobs: int
    conversations: int
    """Deleted ones too."""


def backup(store: Store, file: Path) -> Manifest:
    """Writes the whole store into a new file; the store may be in use meanwhile."""
    with translated(), _whole(file) as archive:
        contents = _database_into(archive, store.database)
        for digest in contents.digests:
            archive.writestr(f"blobs/{digest}", store.blobs.get(digest), zipfile.ZIP_STORED)
        manifest = Manifest(HEAD, contents.tables, len(contents.digests), contents.conversations)
        archive.writestr(_MANIFEST, json.dumps({"format": _FORMAT, **asdict(manifest)}))
    return manifest


def restore(file: Path, folder: Path | None = None, database: str | URL | None = None) -> Manifest:
    """Fills an empty place from a backup, bringing an older schema up to date. NotEmpty where something is there."""
    with translated(), _opened(file) as archive:
        manifest = _manifest(archive)
        place = data_folder(folder)
        with closing(Database(database_url(place, database))) as target:
            _check_empty(target)
            _restore_blobs(archive, place)
            _restore_database(archive, manifest, target)
        with open_store(place, database) as store:
            _bury_holders(store)
            with store.database.reading() as connection:
                return replace(manifest, conversations=_count(connection))


@contextmanager
def _whole(file: Path) -> Iterator[zipfile.ZipFile]:
    """An archive that gets its name when it is complete and synced."""
    if file.exists():
        raise NotEmpty(f"The file {str(file)!r} is there already: name another one.")
    with whole_file(file) as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        yield archive


@dataclass(frozen=True, slots=True)
class _Contents:
    tables: tuple[str, ...]
    digests: tuple[str, ...]
    """The blobs that messages name."""
    conversations: int


def _database_into(archive: zipfile.ZipFile, database: Database) -> _Contents:
    if database.is_sqlite:
        return _file_into(archive, database)
    with database.reading() as connection:
        connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        tables = reflect_tables(connection)
        for table in tables:
            with archive.open(f"rows/{table.name}.jsonl", "w", force_zip64=True) as out:
                for line in dump_rows(connection, table):
                    out.write(line.encode())
        return _contents(connection, [table.name for table in tables])


def _file_into(archive: zipfile.ZipFile, database: Database) -> _Contents:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        with database.reading() as connection, closing(sqlite3.connect(copy)) as target:
            source: Any = connection.connection.driver_connection
            source.backup(target)
        archive.write(copy, DATABASE)
        with closing(Database(database_url(Path(folder)))) as copied, copied.reading() as connection:
            return _contents(connection)


def _contents(connection: Connection, tables: Sequence[str] = ()) -> _Contents:
    digests = connection.execute(select(message_blobs.c.digest).distinct()).scalars()
    return _Contents(tuple(tables), tuple(digests), _count(connection))


def _count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(conversations)).scalar_one()


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except FileNotFoundError:
        raise BadBackup(f"There is no file {str(file)!r}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise BadBackup(f"The file {str(file)!r} is no whole backup: {error}.") from error


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    try:
        content = json.loads(archive.read(_MANIFEST))
        if content["format"] != _FORMAT:
            raise KeyError(_FORMAT)
        counts = content["blobs"], content.get("conversations", 0)
        manifest = Manifest(content["revision"], tuple(content["tables"]), *counts)
    except (KeyError, ValueError):
        raise BadBackup("The file is no backup of Palaver's: it has no manifest.") from None
    if manifest.revision > HEAD:
        raise BadBackup("The backup was made by a newer Palaver: update Palaver first.")
    return manifest


def _check_empty(target: Database) -> None:
    """A store that nobody has written to is as good as none."""
    if _is_new(target):
        return
    current = current_revision(target)
    with target.reading() as connection:
        used = current is None or any(_has_rows(connection, table) for table in reflect_tables(connection))
    if used:
        raise NotEmpty(f"There is a store at {target.url.render_as_string()!r} already: restore into an empty place.")


def _has_rows(connection: Connection, table: Table) -> bool:
    """Users and holders are there as soon as a store was looked at."""
    return table.name not in ("users", "holders") and connection.execute(select(table).limit(1)).first() is not None


def _is_new(target: Database) -> bool:
    return not target.path.exists() if target.is_sqlite else current_revision(target) is None


def _restore_database(archive: zipfile.ZipFile, manifest: Manifest, target: Database) -> None:
    if not _is_new(target):
        _convert(archive, manifest, target)
    elif manifest.tables:
        _load_rows(archive, manifest, target)
    elif target.is_sqlite:
        _place_file(archive, target)
    else:
        _convert(archive, manifest, target)


def _restore_blobs(archive: zipfile.ZipFile, place: Path) -> None:
    blobs = Blobs(place / "blobs")
    for name in archive.namelist():
        if name.startswith("blobs/"):
            data = archive.read(name)
            if hashlib.sha256(data).hexdigest() != name.removeprefix("blobs/"):
                raise BadBackup(f"The backup is damaged: {name!r} is not what was written.")
            blobs.put(data)


def _place_file(archive: zipfile.ZipFile, target: Database) -> None:
    beside = target.path.with_name(f".{target.path.name}.{secrets.token_hex(4)}")
    try:
        _extract(archive, beside)
        beside.replace(target.path)
    except BaseException:
        beside.unlink(missing_ok=True)
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
            whole = connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        except sqlite3.DatabaseError:
            whole = False
        if not whole:
            raise Damaged("The database in the backup is damaged.")


def _load_rows(archive: zipfile.ZipFile, manifest: Manifest, target: Database) -> None:
    migrate(target, manifest.revision)
    with target.writing() as connection:
        for table in reflect_tables(connection):
            with archive.open(f"rows/{table.name}.jsonl") as raw:
                load_rows(connection, table, io.TextIOWrapper(raw, "utf-8"))
        count_on(connection)
    _finish(target)


def _convert(archive: zipfile.ZipFile, manifest: Manifest, target: Database) -> None:
    """Row by row: into another kind of database, or one that has its schema already."""
    with tempfile.TemporaryDirectory() as folder:
        with closing(Database(database_url(Path(folder)))) as unpacked:
            _restore_database(archive, manifest, unpacked)
        with open_store(Path(folder)) as source:
            migrate(target)
            with source.database.reading() as old, target.writing() as new:
                new.execute(delete(users))
                tables = {table.name: table for table in reflect_tables(old)}
                for table in reflect_tables(new):
                    load_rows(new, table, dump_rows(old, tables[table.name]))
                count_on(new)
    _finish(target)


def _finish(target: Database) -> None:
    migrate(target)
    with target.writing() as connection:
        rebuild(connection)


def _bury_holders(store: Store) -> None:
    """Whoever held a running reply then holds it no longer here."""
    with store.database.writing() as connection:
        connection.execute(update(holders).values(expires_at=0))
    store.replies.interrupt_orphans()
