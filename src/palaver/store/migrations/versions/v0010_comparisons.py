"""Comparisons of replies, and which of them was chosen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "comparisons",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("conversation_id", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
        sa.Column("parent_id", sa.Text, nullable=False),
        sa.Column("blind", sa.Boolean, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("decided_at", sa.BigInteger),
        sa.Column("chosen_id", sa.Text),
        sa.UniqueConstraint("conversation_id", "key", name="uq_comparisons_key"),
    )
    op.create_table(
        "compared_replies",
        sa.Column("comparison_id", sa.Text, sa.ForeignKey("comparisons.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("message_id", sa.Text, sa.ForeignKey("messages.id", ondelete="CASCADE"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
    )
    op.create_index("ix_compared_replies_message", "compared_replies", ["message_id"])
