"""Classes say which KV of their requests is kept: all of it, where nobody has said so.

Definitions are compared with those of the configuration: without the new field all would look edited.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_DEFINITIONS = {
    "qos_classes": ("name", ["definition"]),
    "declared_classes": ("name", ["definition"]),
    "class_edits": ("revision", ["definition", "before"]),
}  # by table: its key, and the columns that hold definitions


def upgrade() -> None:
    """Adds the field to every definition."""
    for name, (key, columns) in _DEFINITIONS.items():
        table = sa.table(name, sa.column(key), *(sa.column(one, sa.JSON(none_as_null=True)) for one in columns))
        for row in op.get_bind().execute(sa.select(table)).mappings().all():
            changed = {one: {**row[one], "kv_policy": None} for one in columns if row[one] is not None}
            if changed:
                op.execute(sa.update(table).where(table.c[key] == row[key]).values(changed))
