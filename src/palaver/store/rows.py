"""Every row of the store as lines of JSON, and back: how a backup goes from one kind of database to another."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from sqlalchemy import Connection, MetaData, Table, insert, select, text

_BATCH = 500


def reflected(connection: Connection) -> list[Table]:
    """The tables as they are in this database, parents first; not the index, which is made anew."""
    found = MetaData()
    found.reflect(connection, only=lambda name, _: not name.startswith(("search_", "alembic_")))
    return list(found.sorted_tables)


def dumped(connection: Connection, table: Table) -> Iterator[str]:
    """One line a row, in the order of the key: a message comes after its parent."""
    rows = connection.execution_options(yield_per=_BATCH).execute(select(table).order_by(*table.primary_key))
    for row in rows.mappings():
        yield json.dumps({name: _plain(value) for name, value in row.items()}) + "\n"


def load(connection: Connection, table: Table, lines: Iterable[str]) -> int:
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
