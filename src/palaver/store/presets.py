"""Presets: what a user likes to set for conversations, under names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, insert, select

from palaver.store.database import Database
from palaver.store.errors import NotFound
from palaver.store.names import checked_name
from palaver.store.schema import presets
from palaver.store.values import Preset


class Presets:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, owner: str) -> tuple[Preset, ...]:
        """By name."""
        wanted = select(presets).where(presets.c.owner_id == owner).order_by(presets.c.name)
        with self._database.reading() as connection:
            return tuple(Preset(row.name, row.system, row.parameters) for row in connection.execute(wanted))

    def save(self, owner: str, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        """In place of one that had the name."""
        preset = Preset(checked_name("name", name), system, dict(parameters))
        with self._database.writing() as connection:
            connection.execute(_one(owner, name))
            connection.execute(
                insert(presets).values(owner_id=owner, name=name, system=system, parameters=preset.parameters)
            )
        return preset

    def delete(self, owner: str, name: str) -> None:
        with self._database.writing() as connection:
            if not connection.execute(_one(owner, name)).rowcount:
                raise NotFound("preset", name)


def _one(owner: str, name: str) -> Any:
    return delete(presets).where(presets.c.owner_id == owner, presets.c.name == name)
