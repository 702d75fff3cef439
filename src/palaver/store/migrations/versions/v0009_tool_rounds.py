"""Rounds of tool calls that Palaver runs, their calls, and the rules by which users approve them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "tool_rounds",
        sa.Column("message_id", sa.Text, sa.ForeignKey("replies.message_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("next_id", sa.Text),
        sa.Column("continued", sa.Boolean, nullable=False),
    )
    op.create_index("ix_tool_rounds_state", "tool_rounds", ["state"])
    op.create_table(
        "tool_calls",
        sa.Column("message_id", sa.Text, sa.ForeignKey("tool_rounds.message_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("edited", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("holder_id", sa.Text),
        sa.Column("result", sa.Text),
        sa.Column("is_error", sa.Boolean, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
    )
    op.create_table(
        "tool_rules",
        sa.Column("owner_id", sa.Text, sa.ForeignKey("users.id"), primary_key=True),
        sa.Column("conversation_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("rule", sa.Text, nullable=False),
    )
