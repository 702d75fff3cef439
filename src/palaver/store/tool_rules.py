"""Rules about tools: which calls a user always allows or never allows, so that they are not asked about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import delete, insert, select

from palaver.store.database import Database
from palaver.store.schema import conversations, tool_rules


class Rule(StrEnum):
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ToolRule:
    """What a user decided for the future."""

    name: str
    """Of a tool, or of a server for all its tools."""
    rule: Rule
    conversation_id: str = ""
    """The conversation in which the rule of a tool holds; empty for a server: it holds in all."""


class ToolRules:
    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, owner: str, conversation_id: str, tool: str, server: str) -> Rule | None:
        """The rule for a tool: that of the tool in the conversation, or that of its server. Never is stronger."""
        names = tool_rules.c.name.in_((tool, server))
        places = tool_rules.c.conversation_id.in_((conversation_id, ""))
        query = select(tool_rules.c.rule).where(tool_rules.c.owner_id == owner, names, places)
        with self._database.read_transaction() as connection:
            found = set(connection.execute(query).scalars())
        if Rule.NEVER.value in found:
            return Rule.NEVER
        return Rule.ALWAYS if Rule.ALWAYS.value in found else None

    def save(self, owner: str, conversation_id: str, name: str, rule: Rule | None) -> None:
        """For a tool in a conversation, or, with an empty `conversation_id`, for a server. None removes the rule."""
        same = (
            tool_rules.c.owner_id == owner,
            tool_rules.c.conversation_id == conversation_id,
            tool_rules.c.name == name,
        )
        with self._database.write_transaction() as connection:
            connection.execute(delete(tool_rules).where(*same))
            if rule is not None:
                row = {"owner_id": owner, "conversation_id": conversation_id, "name": name, "rule": rule.value}
                connection.execute(insert(tool_rules).values(row))

    def list_all(self, owner: str) -> tuple[ToolRule, ...]:
        """The rules of a user, without those of deleted conversations."""
        gone = select(conversations.c.id).where(conversations.c.deleted_at.is_not(None))
        query = select(tool_rules).where(tool_rules.c.owner_id == owner, tool_rules.c.conversation_id.not_in(gone))
        with self._database.read_transaction() as connection:
            rows = connection.execute(query.order_by(tool_rules.c.name, tool_rules.c.conversation_id))
            return tuple(ToolRule(row.name, Rule(row.rule), row.conversation_id) for row in rows)

    def forget(self, owner: str, name: str | None = None, conversation_id: str | None = None) -> int:
        """Removes rules of a user: all, those of a name, or those in a conversation. Returns how many."""
        which = delete(tool_rules).where(tool_rules.c.owner_id == owner)
        if name is not None:
            which = which.where(tool_rules.c.name == name)
        if conversation_id is not None:
            which = which.where(tool_rules.c.conversation_id == conversation_id)
        with self._database.write_transaction() as connection:
            return connection.execute(which).rowcount

    def forget_server(self, owner: str, server: str) -> None:
        """Removes all rules of a user for a server and its tools."""
        prefix = f"{server}__".replace("_", "\\_")
        mine = tool_rules.c.name.like(f"{prefix}%", escape="\\") | (tool_rules.c.name == server)
        with self._database.write_transaction() as connection:
            connection.execute(delete(tool_rules).where(tool_rules.c.owner_id == owner, mine))
