"""Brings a ledger's tables to the newest revision, whoever else does the same at this moment."""

from __future__ import annotations

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, text

from halfmoon.errors import Incompatible

_SCHEMA = Path(__file__).parent / "schema"
_LOCK = 0x48414C464D4F4F4E  # "HALFMOON": any number that nobody else's advisory locks have


def upgrade(connection: Connection) -> None:
    """Runs the migrations that are missing, all or none of them, in the connection's transaction.

    On SQLite that transaction must be one that writes. Raises Incompatible for a ledger of a later release.
    """
    scripts = ScriptDirectory(str(_SCHEMA), version_locations=[str(_SCHEMA)])
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    context = MigrationContext.configure(connection)
    current = context.get_current_revision()
    with Operations.context(context):
        for script in _missing(scripts, current):
            script.module.upgrade()
            context.stamp(scripts, script.revision)


def is_current(connection: Connection) -> bool:
    """Whether nothing is missing, which a reader can tell without waiting for anybody. Raises Incompatible."""
    scripts = ScriptDirectory(str(_SCHEMA), version_locations=[str(_SCHEMA)])
    return not _missing(scripts, MigrationContext.configure(connection).get_current_revision())


def _missing(scripts: ScriptDirectory, current: str | None) -> list[Script]:
    """Oldest first."""
    known = {script.revision for script in scripts.walk_revisions()}
    newest = scripts.get_current_head()
    if current is not None and current not in known:
        raise Incompatible(
            f"the ledger has schema {current}, and this release knows none after {newest}: a later release wrote it. "
            "Run that one, or choose another ledger with --ledger-url"
        )
    newer = scripts.iterate_revisions("head", current or "base")
    return list(reversed([script for script in newer if script.revision != current]))
