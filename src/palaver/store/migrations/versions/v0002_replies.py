"""Replies with their tokens, and who holds those that run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "holders",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "replies",
        sa.Column("message_id", sa.Text, sa.ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tokenizer", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("usage", sa.Text),
        sa.Column("timings", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
    )
    op.create_table(
        "running",
        sa.Column("message_id", sa.Text, _reply(), primary_key=True),
        sa.Column("holder_id", sa.Text, sa.ForeignKey("holders.id"), nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
    )
    op.create_index("ix_running_holder", "running", ["holder_id"])
    op.create_table(
        "reply_tokens",
        sa.Column("message_id", sa.Text, _reply(), primary_key=True),
        sa.Column("start", sa.Integer, primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )


def _reply() -> sa.ForeignKey:
    return sa.ForeignKey("replies.message_id", ondelete="CASCADE")
