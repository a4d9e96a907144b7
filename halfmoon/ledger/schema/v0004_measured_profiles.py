"""Whole measured profiles, by name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the table; earlier profiles were coefficients only, and stay where they are."""
    op.create_table(
        "measured_profiles",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("profile", sa.JSON, nullable=False),
    )
