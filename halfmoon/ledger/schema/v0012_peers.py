"""Which requests a peer gateway answered instead of the one that got them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Adds the column; earlier rows have no value in it."""
    op.add_column("requests", sa.Column("peer", sa.String(256)))
