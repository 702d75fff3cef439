from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, text

from palaver.store import Store, open_store
from tests.store.postgres import running_server, server_binaries

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class StoreLocation:
    """The folder and the database of a test's store: opening it again gives the same store."""

    folder: Path
    database: URL | None

    def open(self, lock_timeout: float = 5.0) -> Store:
        return open_store(self.folder, self.database, lock_timeout)


@pytest.fixture(scope="session")
def postgres() -> Iterator[URL]:
    binaries = server_binaries()
    if binaries is None:
        assert not os.environ.get("CI"), "PostgreSQL must be tested here, but no server is installed"
        pytest.skip("!!! NOT TESTED ON POSTGRESQL: no server is installed (Debian: apt install postgresql)")
    with running_server(binaries) as url:
        run_sql(url, "CREATE DATABASE prepared")
        yield url


@pytest.fixture(scope="session")
def prepared_postgres(postgres: URL, tmp_path_factory: pytest.TempPathFactory) -> URL:
    """A database with the schema in it, to be copied."""
    StoreLocation(tmp_path_factory.mktemp("prepared"), postgres.set(database="prepared")).open().close()
    return postgres


@pytest.fixture(scope="session")
def prepared_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    StoreLocation(folder, None).open().close()
    return folder / "palaver.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> StoreLocation:
    """A place without a schema."""
    if request.param == "sqlite":
        return StoreLocation(tmp_path / "store", None)
    return StoreLocation(tmp_path / "store", fresh_database(request.getfixturevalue("postgres")))


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StoreLocation:
    """A place with an empty store."""
    folder = tmp_path / "store"
    folder.mkdir()
    if request.param == "sqlite":
        copy_sqlite(request.getfixturevalue("prepared_sqlite"), folder / "palaver.db")
        return StoreLocation(folder, None)
    return StoreLocation(folder, fresh_database(request.getfixturevalue("prepared_postgres"), "prepared"))


@pytest.fixture
def store(place: StoreLocation) -> Iterator[Store]:
    with place.open() as opened:
        yield opened


@pytest.fixture
def owner(store: Store) -> str:
    return store.users.ensure().id


def copy_sqlite(source: Path, to: Path) -> None:
    to.write_bytes(source.read_bytes())
    with sqlite3.connect(to) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


def fresh_database(server: URL, template: str = "template0") -> URL:
    name = f"test{next(_NUMBERS)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    return server.set(database=name)


def run_sql(url: URL, statement: str) -> None:
    engine = create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()
