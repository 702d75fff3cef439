"""The current tables. `migrations` creates them; a test checks that both agree."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from palaver.store.database import JsonColumn, Number

HEAD = "0016"
"""The revision of the schema below."""

metadata = MetaData()

users = Table(
    "users",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
)

conversations = Table(
    "conversations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner_id", Text, ForeignKey("users.id"), nullable=False),
    Column("title", Text, nullable=False),
    Column("title_given", Boolean, nullable=False),
    Column("system", JsonColumn, nullable=False),
    Column("parameters", JsonColumn, nullable=False),
    Column("head_id", Text),
    Column("key", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("owner_id", "key", name="uq_conversations_key"),
)
Index("ix_conversations_recent", conversations.c.owner_id, conversations.c.updated_at)

tags = Table(
    "tags",
    metadata,
    Column("conversation_id", Text, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("tag", Text, primary_key=True),
)
Index("ix_tags_tag", tags.c.tag)

messages = Table(
    "messages",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("conversation_id", Text, ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    Column("parent_id", Text),
    Column("role", Text, nullable=False),
    Column("parts", JsonColumn, nullable=False),
    Column("edit_of", Text),
    Column("key", Text),
    Column("created_at", BigInteger, nullable=False),
    UniqueConstraint("conversation_id", "id", name="uq_messages_place"),
    UniqueConstraint("conversation_id", "key", name="uq_messages_key"),
    ForeignKeyConstraint(
        ["conversation_id", "parent_id"],
        ["messages.conversation_id", "messages.id"],
        name="fk_messages_parent",  # no cascade: a long branch would be deleted level by level
    ),
    sqlite_autoincrement=True,
)
Index("ix_messages_parent", messages.c.conversation_id, messages.c.parent_id)

message_blobs = Table(
    "message_blobs",
    metadata,
    Column("message_id", Text, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
    Column("digest", Text, primary_key=True),
)
Index("ix_message_blobs_digest", message_blobs.c.digest)

holders = Table(
    "holders",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("address", Text),
)

replies = Table(
    "replies",
    metadata,
    Column("message_id", Text, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("tokenizer", Text, nullable=False),
    Column("settings", JsonColumn, nullable=False),
    Column("usage", JsonColumn),
    Column("timings", JsonColumn, nullable=False),
    Column("error", JsonColumn),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
)

running = Table(
    "running",
    metadata,
    Column("message_id", Text, ForeignKey("replies.message_id", ondelete="CASCADE"), primary_key=True),
    Column("holder_id", Text, ForeignKey("holders.id"), nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("timings", JsonColumn),
    Column("watched", Boolean, nullable=False, server_default=false()),
    Column("stop_requested", Boolean, nullable=False, server_default=false()),
    Column("answer_requested", Boolean, nullable=False, server_default=false()),
)
Index("ix_running_holder", running.c.holder_id)

reply_tokens = Table(
    "reply_tokens",
    metadata,
    Column("message_id", Text, ForeignKey("replies.message_id", ondelete="CASCADE"), primary_key=True),
    Column("start", Integer, primary_key=True),
    Column("count", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

cursors = Table(
    "cursors",
    metadata,
    Column("conversation_id", Text, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("client", Text, primary_key=True),
    Column("number", Integer, nullable=False),
)

moves = Table(
    "moves",
    metadata,
    Column("conversation_id", Text, primary_key=True),
    Column("client", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("message_id", Text),
    ForeignKeyConstraint(
        ["conversation_id", "client"],
        ["cursors.conversation_id", "cursors.client"],
        name="fk_moves_cursor",
        ondelete="CASCADE",
    ),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("digest", Text, nullable=False),
    Column("admin", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger),
)
Index("ix_keys_user", keys.c.user_id)

rate_limits = Table(
    "rate_limits",
    metadata,
    Column("caller", Text, primary_key=True),
    Column("remaining", Double, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
)

uploads = Table(
    "uploads",
    metadata,
    Column("owner_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
)

presets = Table(
    "presets",
    metadata,
    Column("owner_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("system", JsonColumn, nullable=False),
    Column("parameters", JsonColumn, nullable=False),
)

tool_rounds = Table(
    "tool_rounds",
    metadata,
    Column("message_id", Text, ForeignKey("replies.message_id", ondelete="CASCADE"), primary_key=True),
    Column("state", Text, nullable=False),
    Column("error", JsonColumn),
    Column("next_id", Text),
    Column("continued", Boolean, nullable=False),
)
Index("ix_tool_rounds_state", tool_rounds.c.state)

tool_calls = Table(
    "tool_calls",
    metadata,
    Column("message_id", Text, ForeignKey("tool_rounds.message_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("call_id", JsonColumn, nullable=False),
    Column("name", JsonColumn, nullable=False),
    Column("arguments", JsonColumn, nullable=False),
    Column("edited", JsonColumn),
    Column("state", Text, nullable=False),
    Column("holder_id", Text),
    Column("result", JsonColumn),
    Column("is_error", Boolean, nullable=False),
    Column("media", JsonColumn),
    Column("started_at", BigInteger),
    Column("ended_at", BigInteger),
)

tool_rules = Table(
    "tool_rules",
    metadata,
    Column("owner_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("conversation_id", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rule", Text, nullable=False),
)

comparisons = Table(
    "comparisons",
    metadata,
    Column("id", Text, primary_key=True),
    Column("conversation_id", Text, ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    Column("parent_id", Text, nullable=False),
    Column("blind", Boolean, nullable=False),
    Column("key", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("decided_at", BigInteger),
    Column("chosen_id", Text),
    UniqueConstraint("conversation_id", "key", name="uq_comparisons_key"),
)

compared_replies = Table(
    "compared_replies",
    metadata,
    Column("comparison_id", Text, ForeignKey("comparisons.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("message_id", Text, ForeignKey("messages.id", ondelete="CASCADE"), nullable=False),
    Column("name", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("parameters", JsonColumn, nullable=False),
)
Index("ix_compared_replies_message", compared_replies.c.message_id)

shares = Table(
    "shares",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("conversation_id", Text, ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    Column("leaf_id", Text, nullable=False),
    Column("thoughts", Boolean, nullable=False),
    Column("tools", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
Index("ix_shares_conversation", shares.c.conversation_id)

defaults = Table(
    "defaults",
    metadata,
    Column("owner_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("system", JsonColumn, nullable=False),
    Column("parameters", JsonColumn, nullable=False),
)
