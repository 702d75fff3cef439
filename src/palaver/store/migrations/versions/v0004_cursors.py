"""Clients' cursors, and the journal of their moves that undo and redo walk."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "cursors",
        sa.Column("conversation_id", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("client", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
    )
    op.create_table(
        "moves",
        sa.Column("conversation_id", sa.Text, primary_key=True),
        sa.Column("client", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("message_id", sa.Text),
        sa.ForeignKeyConstraint(
            ["conversation_id", "client"],
            ["cursors.conversation_id", "cursors.client"],
            name="fk_moves_cursor",
            ondelete="CASCADE",
        ),
    )
