"""Upgrades a ledger's tables to the newest revision, safely against concurrent upgrades."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, text

from halfmoon.errors import Incompatible

_SCHEMA = Path(__file__).parents[1] / "schema"
_LOCK = 0x48414C464D4F4F4E  # "HALFMOON": a number unlikely to clash with other advisory locks


def upgrade(connection: Connection) -> None:
    """Runs the missing migrations, all or none of them, in the connection's transaction.

    On SQLite that transaction must be a writing one. Raises Incompatible for a ledger of a later release.
    """
    scripts = _scripts()
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    context = MigrationContext.configure(connection)
    missing = _missing(scripts, context.get_current_revision())
    with Operations.context(context):
        for script in missing:
            script.module.upgrade()
    if missing:
        context.stamp(scripts, missing[-1].revision)


def is_current(connection: Connection) -> bool:
    """Whether no migration is missing, which a reader can tell without waiting. Raises Incompatible."""
    return not _missing(_scripts(), MigrationContext.configure(connection).get_current_revision())


@cache
def _scripts() -> ScriptDirectory:
    """The migrations of this release, read once a process."""
    return ScriptDirectory(str(_SCHEMA), version_locations=[str(_SCHEMA)])


def _missing(scripts: ScriptDirectory, current: str | None) -> list[Script]:
    """The missing migrations, oldest first."""
    known = {script.revision for script in scripts.walk_revisions()}
    newest = scripts.get_current_head()
    if current is not None and current not in known:
        raise Incompatible(
            f"the ledger has schema {current}, and this release knows none after {newest}: a later release wrote it. "
            "Run that one, or choose another ledger with --ledger-url"
        )
    newer = scripts.iterate_revisions("head", current or "base")
    return list(reversed([script for script in newer if script.revision != current]))
