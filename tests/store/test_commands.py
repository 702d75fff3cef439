"""The commands on both databases; tests/test_store_commands.py has them in detail."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from palaver.cli import app
from palaver.store import Store
from palaver.transcripts import read_conversation
from tests.store.conftest import StoreLocation, fresh_database
from tests.store.factories import add_message, add_reply, new_conversation


def run(place: StoreLocation, *arguments: object) -> str:
    where = ["--data", str(place.folder)]
    if place.database is not None:
        where += ["--database", place.database.render_as_string(hide_password=False)]
    result = CliRunner().invoke(app, [*map(str, arguments), *where])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_export_import_delete_backup_restore(store: Store, place: StoreLocation, tmp_path: Path) -> None:
    made = new_conversation(store, title="Rivers")
    add_reply(store, store.leases.open(), made.id, add_message(store, made.id, None, "Which river?").id, "The Rhine.")
    assert made.id in run(place, "conversations", "--search", "rhin")
    run(place, "export", made.id[:8], "--as", "tree", "-o", tmp_path / "one.jsonl")
    assert "1 imported" in run(place, "import", tmp_path / "one.jsonl")
    assert len(run(place, "conversations").splitlines()) == 2
    run(place, "delete", made.id)
    assert made.id in run(place, "conversations", "--deleted")
    run(place, "undelete", made.id)
    run(place, "backup", tmp_path / "all.zip")
    target = None if place.database is None else fresh_database(place.database.set(database="postgres"))
    elsewhere = StoreLocation(tmp_path / "elsewhere", target)
    assert run(elsewhere, "conversations") == ""
    assert "2 conversations" in run(elsewhere, "restore", tmp_path / "all.zip")
    with elsewhere.open() as other:
        assert read_conversation(other, made.id) == read_conversation(store, made.id)
