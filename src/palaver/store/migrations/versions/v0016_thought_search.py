"""The index has the words of thoughts, too."""

from __future__ import annotations

from alembic import op

from palaver.store.search import rebuild

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    rebuild(op.get_bind())
