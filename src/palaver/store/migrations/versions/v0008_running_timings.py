"""Timings of running replies: recorded with every token, so that they are known after a crash.

From here on the timings of a reply cover all of its tokens, or are empty. Those of replies that an earlier version left
in the middle of a continued run are removed: they only cover the runs before.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_replies = sa.table("replies", sa.column("message_id"), sa.column("status"), sa.column("usage"), sa.column("timings"))
_running = sa.table("running", sa.column("tokens"), sa.column("timings"))
_tokens = sa.table("reply_tokens", sa.column("message_id"), sa.column("start"), sa.column("count"))


def upgrade() -> None:
    op.add_column("running", sa.Column("timings", sa.Text))
    connection = op.get_bind()
    connection.execute(sa.update(_running).where(_running.c.tokens > 0).values(timings="{}"))
    last = sa.func.max(_tokens.c.start + _tokens.c.count)
    cut = (
        sa.select(_replies.c.message_id, _replies.c.usage, last)
        .outerjoin(_tokens, _tokens.c.message_id == _replies.c.message_id)
        .where(_replies.c.status.in_(("interrupted", "failed")), _replies.c.timings != "{}")
        .group_by(_replies.c.message_id, _replies.c.usage)
    )
    for id, usage, tokens in connection.execute(cut).all():
        if not usage or json.loads(usage).get("reply_tokens") != (tokens or 0):
            connection.execute(sa.update(_replies).where(_replies.c.message_id == id).values(timings="{}"))
