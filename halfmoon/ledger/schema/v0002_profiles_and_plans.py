"""Latency profiles, plans, the revision of the classes; the gateway of a request's row, and the parts of its TTFT."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Adds the tables and columns; older rows have no value in them."""
    op.add_column("requests", sa.Column("gateway_id", sa.String(64)))
    op.add_column("requests", sa.Column("num_outputs", sa.Integer))
    for name in ("prefill_s", "predicted_queue_s", "predicted_prefill_s"):
        op.add_column("requests", sa.Column(name, sa.Double))
    revisions = op.create_table(
        "class_revision",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.Integer, nullable=False),
    )
    op.bulk_insert(revisions, [{"id": 1, "revision": 0}])
    op.create_table(
        "latency_profiles",
        sa.Column("kind", sa.String(256), primary_key=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("prefill", sa.JSON, nullable=False),
        sa.Column("step", sa.JSON, nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("id", _ROW_NUMBER, primary_key=True, autoincrement=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("goal", sa.JSON, nullable=False),
        sa.Column("layout", sa.JSON, nullable=False),
        sa.Column("figures", sa.JSON, nullable=False),
    )
    op.create_index("ix_plans_created_at", "plans", ["created_at"])
