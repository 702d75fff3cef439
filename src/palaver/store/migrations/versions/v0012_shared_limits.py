"""What all servers on one store share: the rates of callers, and uploads that no message references yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "rate_limits",
        sa.Column("caller", sa.Text, primary_key=True),
        sa.Column("remaining", sa.Double, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "uploads",
        sa.Column("owner_id", sa.Text, sa.ForeignKey("users.id"), primary_key=True),
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
