"""The admission mode that operators set for all gateways, with its history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds the table, empty: each gateway uses its own mode."""
    op.create_table(
        "admission_edits",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("edited_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("mode", sa.String(16)),
    )
