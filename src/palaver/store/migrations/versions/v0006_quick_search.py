"""The index knows owners, conversations and pairs of characters; PostgreSQL's has all words of a message in one row."""

from __future__ import annotations

from alembic import op

from palaver.store.search import rebuild

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        rebuild(op.get_bind())
        return
    op.execute("DROP INDEX ix_search_words")
    rebuild(op.get_bind())
    # no list of pending entries: every search would read all of it
    op.execute(
        "CREATE INDEX ix_search_words ON search_words USING gin (words) WITH (fastupdate = off) WHERE piece <= 0"
    )
