"""Tenants, their API keys by digest, whose request a row is; rules of classes name API keys by digest."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_HASHED = re.compile(r"sha256:[0-9a-f]{16}")
_DEFINITIONS = (
    ("qos_classes", "name", ("definition",)),
    ("class_edits", "revision", ("definition", "before")),
    ("declared_classes", "name", ("definition",)),
)  # table, primary key, columns with a class


def upgrade() -> None:
    """Adds the tables, empty: no key is needed. Older rows have no tenant. No key is left in clear."""
    op.add_column("requests", sa.Column("tenant", sa.String(64)))
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("definition", sa.JSON, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("label", sa.String(128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
    )
    revisions = op.create_table(
        "tenant_revision",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.Integer, nullable=False),
    )
    op.bulk_insert(revisions, [{"id": 1, "revision": 0}])
    for table, key, columns in _DEFINITIONS:
        _hash_keys(table, key, columns)


def _hash_keys(table: str, key: str, columns: tuple[str, ...]) -> None:
    rows = sa.table(table, sa.column(key), *(sa.column(name, sa.JSON(none_as_null=True)) for name in columns))
    connection = op.get_bind()
    for row in connection.execute(sa.select(rows)).mappings().all():
        hashed = {name: _hashed(row[name]) for name in columns}
        if any(hashed[name] != row[name] for name in columns):
            connection.execute(sa.update(rows).where(rows.c[key] == row[key]).values(hashed))


def _hashed(definition: Any) -> Any:
    """The definition with the digest of each key, as `halfmoon.rpc.credentials.api_keys.rule_value` writes it."""
    if not isinstance(definition, dict) or not isinstance(definition.get("rules"), list):
        return definition
    return {**definition, "rules": [_hashed_rule(rule) for rule in definition["rules"]]}


def _hashed_rule(rule: Any) -> Any:
    if not isinstance(rule, dict) or rule.get("kind") != "api_key" or _HASHED.fullmatch(str(rule.get("value"))):
        return rule
    digest = sha256(str(rule.get("value")).encode(errors="surrogateescape")).hexdigest()
    return {**rule, "value": f"sha256:{digest[:16]}"}
