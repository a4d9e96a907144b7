"""How many tokens workers guessed of each request, and how many of these were right."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Adds the columns; earlier rows have no value in them."""
    for name in ("num_drafts", "num_right_drafts"):
        op.add_column("requests", sa.Column(name, sa.Integer()))
