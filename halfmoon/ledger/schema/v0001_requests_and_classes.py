"""Requests and QoS classes. Ledgers without a revision already have these tables, maybe without the later columns."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Creates whatever is absent."""
    inspector = sa.inspect(op.get_bind())
    tables = inspector.get_table_names()
    if "requests" in tables:
        present = {column["name"] for column in inspector.get_columns("requests")}
        for column in _later():
            if column.name not in present:
                op.add_column("requests", column)
    else:
        _create_requests()
    if "qos_classes" not in tables:
        op.create_table(
            "qos_classes",
            sa.Column("name", sa.String(64), primary_key=True),
            sa.Column("version", sa.Integer, nullable=False),
            sa.Column("definition", sa.JSON, nullable=False),
        )


def _later() -> list[sa.Column[Any]]:
    names = ("predicted_ttft_s", "predicted_tbt_s")
    return [sa.Column("qos_class", sa.String(64)), *(sa.Column(name, sa.Double) for name in names)]


def _create_requests() -> None:
    op.create_table(
        "requests",
        sa.Column("id", _ROW_NUMBER, primary_key=True, autoincrement=True),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("http_status", sa.Integer, nullable=False),
        sa.Column("error", sa.String),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String(16)),
        sa.Column("prefill_worker", sa.String(256)),
        sa.Column("decode_worker", sa.String(256)),
        sa.Column("queue_s", sa.Double),
        sa.Column("ttft_s", sa.Double),
        sa.Column("mean_tbt_s", sa.Double),
        sa.Column("max_tbt_s", sa.Double),
        sa.Column("e2e_s", sa.Double, nullable=False),
        sa.Column("num_retries", sa.Integer, nullable=False),
        *_later(),
    )
    op.create_index("ix_requests_request_id", "requests", ["request_id"])
    op.create_index("ix_requests_created_at", "requests", ["created_at"])
