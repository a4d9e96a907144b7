"""Responses, files and batches that clients have kept here."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Adds the tables, empty."""
    op.create_table(
        "stored_responses",
        *_owned(),
        sa.Column("previous_id", sa.String(64)),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, index=True),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("input", sa.JSON, nullable=False),
        sa.Column("response", sa.JSON, nullable=False),
        sa.Column("job", sa.JSON),
        *_lease(),
    )
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.String(64), primary_key=True),
        sa.Column("first", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("events", sa.JSON, nullable=False),
    )
    op.create_table(
        "files",
        *_owned(),
        sa.Column("filename", sa.String(256), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("is_whole", sa.Boolean, nullable=False),
    )
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "batches",
        *_owned(),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("times", sa.JSON, nullable=False),
        sa.Column("errors", sa.JSON, nullable=False),
        sa.Column("num_total", sa.Integer, nullable=False),
        sa.Column("num_completed", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        *_lease(),
    )
    op.create_table(
        "batch_results",
        sa.Column("batch_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("is_error", sa.Boolean, nullable=False),
        sa.Column("line", sa.LargeBinary, nullable=False),
    )


def _owned() -> tuple[sa.Column[Any], ...]:
    """What a tenant owns, until it expires."""
    return (
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False, index=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False, index=True),
    )


def _lease() -> tuple[sa.Column[Any], ...]:
    """Which gateway works on it."""
    return (
        sa.Column("holder", sa.String(64)),
        sa.Column("leased_until", sa.DateTime(timezone=True)),
        sa.Column("num_claims", sa.Integer, nullable=False),
    )
