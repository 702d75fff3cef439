"""Presets: what a user likes to set for conversations, under names."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "presets",
        sa.Column("owner_id", sa.Text, sa.ForeignKey("users.id"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("system", sa.Text, nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
    )
