"""The content of each edit of the classes, so that it can be looked up and undone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the table of edits; earlier edits are unknown."""
    op.create_table(
        "class_edits",
        sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("edited_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("definition", sa.JSON(none_as_null=True)),
        sa.Column("before", sa.JSON(none_as_null=True)),
    )
