from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from palaver.store import migrations
from palaver.store.database import Database
from palaver.store.errors import NewerSchema
from palaver.store.migrations import current_revision, migrate
from palaver.store.schema import HEAD, metadata
from palaver.store.store import data_folder, database_url
from tests.store.conftest import StoreLocation

VERSIONS = [
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0012",
    "0013",
    "0014",
    "0015",
    "0016",
]


def database(place: StoreLocation) -> Database:
    return Database(database_url(data_folder(place.folder), place.database))


def _ours(_: object, name: str | None, kind: str, *__: object) -> bool:
    return kind != "table" or not (name or "").startswith("search_words")


def test_versions_are_complete_and_end_at_the_schema() -> None:
    scripts = ScriptDirectory(str(migrations.__path__[0]))
    assert [script.revision for script in scripts.walk_revisions()] == VERSIONS[::-1]
    assert VERSIONS[-1] == HEAD


@pytest.mark.parametrize("earlier", [None, *VERSIONS])
def test_every_earlier_schema_is_migrated(empty: StoreLocation, earlier: str | None) -> None:
    before = database(empty)
    if earlier is not None:
        migrate(before, earlier)
        with before.write_transaction() as connection:
            _write_something(connection)
    before.close()
    with empty.open() as store:
        with store.database.read_transaction() as connection:
            options = {"include_object": _ours, "compare_type": True}
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, metadata) == []
        if earlier is not None:
            assert store.messages.path("m2")[0].text == "old words"
            assert [hit.message_id for hit in store.search.find("u", "words")] == ["m2", "m1"]


def _write_something(connection: Connection) -> None:
    connection.execute(text("INSERT INTO users VALUES ('u', 'ann', 1)"))
    connection.execute(
        text(
            "INSERT INTO conversations (id, owner_id, title, title_given, system, parameters, created_at, updated_at)"
            " VALUES ('c', 'u', 't', false, '\"\"', '{}', 1, 1)"
        )
    )
    insert = text(
        "INSERT INTO messages (id, conversation_id, parent_id, role, parts, created_at)"
        ' VALUES (:id, \'c\', :parent, \'user\', \'[{"type":"text","text":"old words"}]\', 1)'
    )
    indexed = current_has_index(connection)
    for id, parent in (("m1", None), ("m2", "m1")):
        connection.execute(insert, {"id": id, "parent": parent})
    if indexed:
        from palaver.store.search import rebuild

        rebuild(connection)


def test_timings_that_cover_a_part_of_a_reply_are_removed(empty: StoreLocation) -> None:
    """Before 0008, a crash in a continued run left the timings of the runs before."""
    before = database(empty)
    migrate(before, "0007")
    with before.write_transaction() as connection:
        _write_something(connection)
        for id, status, counted in (("whole", "interrupted", 2), ("part", "interrupted", 1), ("runs", "running", 1)):
            _write_reply(connection, id, status, counted)
        connection.execute(text("INSERT INTO holders VALUES ('h', 'host', 1, 1)"))
        connection.execute(text("INSERT INTO running VALUES ('runs', 'h', 2)"))
    before.close()
    with empty.open() as store:
        timings = {id: store.replies.timings(id) for id in ("whole", "part", "runs")}
        assert timings == {"whole": {"seconds": 3.5}, "part": {}, "runs": {}}


def _write_reply(connection: Connection, id: str, status: str, counted: int) -> None:
    """A reply of two tokens. `counted`: how many of them its usage and its timings cover."""
    values = {"id": id, "status": status, "usage": json.dumps({"reply_tokens": counted}), "timings": '{"seconds":3.5}'}
    connection.execute(
        text(
            "INSERT INTO messages (id, conversation_id, role, parts, created_at)"
            " VALUES (:id, 'c', 'assistant', '[]', 1)"
        ),
        values,
    )
    connection.execute(
        text(
            "INSERT INTO replies (message_id, status, model, tokenizer, settings, usage, timings, started_at)"
            " VALUES (:id, :status, 'm', 't', '{}', :usage, :timings, 1)"
        ),
        values,
    )
    row = {"id": id, "data": b"x"}
    connection.execute(text("INSERT INTO reply_tokens VALUES (:id, 0, 2, :data)"), row)


def current_has_index(connection: Connection) -> bool:
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() >= "0003"


def test_two_processes_may_migrate_at_once(empty: StoreLocation) -> None:
    def begin(_: int) -> None:
        empty.open().close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(begin, range(4)))
    made = database(empty)
    assert current_revision(made) == HEAD
    made.close()


def test_a_new_file_that_another_program_is_writing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own patience doesn't cover turning a file to its write-ahead log."""
    path = tmp_path / "palaver.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE begun (x)")
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("palaver.store.database.time.sleep", lambda _: other.execute("ROLLBACK"))
    made = Database(f"sqlite:///{path}")
    with made.read_transaction() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
    made.close()
    other.close()


def test_a_newer_schema_is_refused(place: StoreLocation) -> None:
    later = database(place)
    with later.write_transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    later.close()
    with pytest.raises(NewerSchema, match="9999"):
        place.open()
