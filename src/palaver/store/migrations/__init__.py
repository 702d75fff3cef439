"""Migrates a database from any earlier schema, or from nothing, to the one of `schema.py`. Versions are append-only."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from palaver.store.database import Database
from palaver.store.errors import NewerSchema
from palaver.store.schema import HEAD

_LOCK = 0x70616C61
"""PostgreSQL's advisory lock while the schema is changed."""


def migrate(database: Database, revision: str = HEAD) -> None:
    """Upgrades the schema to `revision` in one transaction. Other processes wait and find it done."""
    with database.read_transaction() as connection:
        if _revision(connection) == revision:
            return
    with database.write_transaction() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        at = _revision(connection)
        if at is not None and at > revision:
            raise NewerSchema(at)
        _upgrade(connection, revision)


def current_revision(database: Database) -> str | None:
    with database.read_transaction() as connection:
        return _revision(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(connection: Connection, revision: str) -> None:
    from alembic import command  # imported lazily: a database that is up to date does not need it
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
