"""Operators' changes of workers: roles, and drains."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Adds the table, empty."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "worker_changes",
        sa.Column("id", number, primary_key=True, autoincrement=True),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("worker_id", sa.String(256), nullable=False),
        sa.Column("before", sa.String(16), nullable=False),
        sa.Column("after", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("changed_by", sa.String(128), nullable=False),
        sa.Column("is_forced", sa.Boolean, nullable=False),
        sa.Column("gateway_id", sa.String(64), nullable=False),
    )
