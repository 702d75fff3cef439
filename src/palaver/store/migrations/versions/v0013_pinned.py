"""Pinned conversations: lists show them apart, however old they are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("conversations", sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()))
