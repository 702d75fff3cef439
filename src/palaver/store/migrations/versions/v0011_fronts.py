"""Several servers on one store: commands for replies that run elsewhere, readers elsewhere, addresses of processes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("holders", sa.Column("address", sa.Text))
    for name in ("watched", "stop_requested", "answer_requested"):
        op.add_column("running", sa.Column(name, sa.Boolean, nullable=False, server_default=sa.false()))
