"""The autopilot's mode as operators set it, and its decisions with what was predicted and measured of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Adds both tables, empty: the planner's own mode counts."""
    op.create_table(
        "autopilot_edits",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("edited_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("mode", sa.String(16)),
    )
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "autopilot_decisions",
        sa.Column("id", number, primary_key=True, autoincrement=True),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(256), nullable=False),
        sa.Column("worker_id", sa.String(256), nullable=False),
        sa.Column("before", sa.String(16), nullable=False),
        sa.Column("after", sa.String(16), nullable=False),
        sa.Column("split", sa.String(32), nullable=False),
        sa.Column("target", sa.String(32), nullable=False),
        sa.Column("num_needed", sa.Integer, nullable=False),
        *(
            sa.Column(name, sa.Double, nullable=False)
            for name in ("prefill", "decode", "predicted_prefill", "predicted_decode")
        ),
        sa.Column("attainment", sa.Double),
        sa.Column("outcome", sa.String(256), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True)),
        sa.Column("measured_prefill", sa.Double),
        sa.Column("measured_decode", sa.Double),
        sa.Column("measured_attainment", sa.Double),
    )
