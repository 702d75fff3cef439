"""The index for searching, filled from the messages that are there."""

from __future__ import annotations

from alembic import op

from palaver.store.search import rebuild

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _words_of_sqlite()
    else:
        _words_of_postgres()
    rebuild(op.get_bind())


def _words_of_sqlite() -> None:
    op.execute("CREATE VIRTUAL TABLE search_words USING fts5(words, tokenize='ascii', columnsize=0, prefix='1 2 3')")
    op.execute(
        "CREATE TRIGGER search_words_gone AFTER DELETE ON messages "
        "BEGIN DELETE FROM search_words WHERE rowid = old.seq; END"
    )


def _words_of_postgres() -> None:
    op.execute(
        "CREATE TABLE search_words ("
        "seq BIGINT NOT NULL REFERENCES messages (seq) ON DELETE CASCADE, "
        "piece INTEGER NOT NULL, words tsvector NOT NULL, PRIMARY KEY (seq, piece))"
    )
    op.execute("CREATE INDEX ix_search_words ON search_words USING gin (words)")
