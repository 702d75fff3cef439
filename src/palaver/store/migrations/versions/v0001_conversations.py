"""Users, and conversations as trees of messages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("owner_id", sa.Text, sa.ForeignKey("users.id"), nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("title_given", sa.Boolean, nullable=False),
        sa.Column("system", sa.Text, nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("head_id", sa.Text),
        sa.Column("key", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("deleted_at", sa.BigInteger),
        sa.UniqueConstraint("owner_id", "key", name="uq_conversations_key"),
    )
    op.create_index("ix_conversations_recent", "conversations", ["owner_id", "updated_at"])
    op.create_table(
        "tags",
        sa.Column("conversation_id", sa.Text, _conversation(), primary_key=True),
        sa.Column("tag", sa.Text, primary_key=True),
    )
    op.create_index("ix_tags_tag", "tags", ["tag"])
    _messages()


def _messages() -> None:
    op.create_table(
        "messages",
        sa.Column("seq", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("conversation_id", sa.Text, _conversation(), nullable=False),
        sa.Column("parent_id", sa.Text),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("parts", sa.Text, nullable=False),
        sa.Column("edit_of", sa.Text),
        sa.Column("key", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("conversation_id", "id", name="uq_messages_place"),
        sa.UniqueConstraint("conversation_id", "key", name="uq_messages_key"),
        sa.ForeignKeyConstraint(
            ["conversation_id", "parent_id"],
            ["messages.conversation_id", "messages.id"],
            name="fk_messages_parent",  # no cascade: a long branch would be deleted level by level
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_messages_parent", "messages", ["conversation_id", "parent_id"])
    op.create_table(
        "message_blobs",
        sa.Column("message_id", sa.Text, sa.ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("digest", sa.Text, primary_key=True),
    )
    op.create_index("ix_message_blobs_digest", "message_blobs", ["digest"])


def _conversation() -> sa.ForeignKey:
    return sa.ForeignKey("conversations.id", ondelete="CASCADE")
