"""Pictures and sounds that tool calls returned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("tool_calls", sa.Column("media", sa.Text))
