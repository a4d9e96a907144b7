"""Which requests admission refused before it read their prompts: what is predicted of them are lower bounds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Of earlier rows it is not known."""
    op.add_column("requests", sa.Column("refused_unread", sa.Boolean))
