"""The classes as a configuration declared them last, so that what operators edited since stays."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Nothing was declared yet."""
    op.create_table(
        "declared_classes",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("definition", sa.JSON(none_as_null=True)),
    )
