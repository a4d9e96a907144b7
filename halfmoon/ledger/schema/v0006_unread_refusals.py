"""Which requests admission rejected before tokenizing their prompts: their predictions are lower bounds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Adds the column; earlier rows have no value in it."""
    op.add_column("requests", sa.Column("refused_unread", sa.Boolean))
