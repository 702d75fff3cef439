"""Links to read-only pages of conversations, and the settings that a user's new conversations begin with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    conversation = sa.ForeignKey("conversations.id", ondelete="CASCADE")
    op.create_table(
        "shares",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False, unique=True),
        sa.Column("conversation_id", sa.Text, conversation, nullable=False),
        sa.Column("leaf_id", sa.Text, nullable=False),
        sa.Column("thoughts", sa.Boolean, nullable=False),
        sa.Column("tools", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_shares_conversation", "shares", ["conversation_id"])
    op.create_table(
        "defaults",
        sa.Column("owner_id", sa.Text, sa.ForeignKey("users.id"), primary_key=True),
        sa.Column("system", sa.Text, nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
    )
