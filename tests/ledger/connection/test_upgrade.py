"""Ledgers of every earlier release are brought up to date, by however many gateways start; later ones are refused."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from halfmoon.errors import Incompatible
from halfmoon.ledger import schema
from halfmoon.ledger.connection import database, sqlite
from halfmoon.ledger.connection.database import Database, make_engine, open_database
from halfmoon.ledger.connection.sqlite import is_locked
from halfmoon.ledger.ledger import open_ledger
from halfmoon.ledger.models import Base
from tests.ledger.postgresql import PostgresqlServer
from tests.ledger.rows import row

# as the first release made them, without a revision
FIRST = """
CREATE TABLE requests (id {serial} PRIMARY KEY, request_id VARCHAR(128) NOT NULL, created_at {time} NOT NULL,
  model VARCHAR(256) NOT NULL, endpoint VARCHAR(64) NOT NULL, status VARCHAR(16) NOT NULL, http_status INTEGER NOT NULL,
  error VARCHAR, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
  finish_reason VARCHAR(16), prefill_worker VARCHAR(256), decode_worker VARCHAR(256), queue_s FLOAT, ttft_s FLOAT,
  mean_tbt_s FLOAT, max_tbt_s FLOAT, e2e_s FLOAT NOT NULL, num_retries INTEGER NOT NULL);
INSERT INTO requests (request_id, created_at, model, endpoint, status, http_status, prompt_tokens, cached_tokens,
  output_tokens, e2e_s, num_retries) VALUES ('old', '2026-01-01 00:00:00', 'm', 'completions', 'ok', 200, 1, 0, 7, 1, 0)
"""
KINDS = {"sqlite": {"serial": "INTEGER", "time": "DATETIME"}, "postgresql": {"serial": "SERIAL", "time": "TIMESTAMPTZ"}}

OPEN = """
import asyncio, sys
from halfmoon.ledger.connection.sqlite import is_locked
from halfmoon.ledger.ledger import open_ledger
async def main():
    async with open_ledger(sys.argv[1]):
        pass
asyncio.run(main())
"""


async def on_connection(database: Database, work: Any) -> Any:
    async def in_session(session: AsyncSession) -> Any:
        connection: AsyncConnection = await session.connection()
        return await connection.run_sync(work)

    return await database.run(in_session)


async def execute(url: str, *statements: str) -> None:
    """On an empty database too: without tables being made first."""

    engine = make_engine(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


async def test_migrations_make_what_the_models_say(ledger_url: str) -> None:
    async with open_database(ledger_url) as database:
        differences = await on_connection(
            database, lambda connection: compare_metadata(MigrationContext.configure(connection), Base.metadata)
        )
    assert differences == []


async def test_a_ledger_of_the_first_release_is_brought_up_to_date(ledger_url: str) -> None:
    await execute(ledger_url, *FIRST.format(**KINDS[ledger_url.split(":")[0]]).strip().split(";"))
    async with open_ledger(ledger_url) as ledger:
        ledger.record(row(2))
        await ledger.classes.put("gold", {}, 0, len)
    async with open_ledger(ledger_url) as again:
        assert [one.request_id for one in await again.recent(9)] == ["r2", "old"]
        assert [one.qos_class for one in await again.recent(9)] == ["default", None]
        assert [one.name for one in (await again.classes.all()).classes] == ["gold"]


def upgraded_to(connection: Connection, revision: str) -> None:
    """As a release left it whose newest migration this was."""
    folder = str(Path(schema.__file__).parent)
    scripts = ScriptDirectory(folder, version_locations=[folder])
    context = MigrationContext.configure(connection)
    with Operations.context(context):
        for script in reversed(list(scripts.iterate_revisions(revision, "base"))):
            script.module.upgrade()
            context.stamp(scripts, script.revision)


BEFORE = datetime(2025, 12, 31, tzinfo=UTC)
OLD_ROWS = {
    "0001": (
        "INSERT INTO requests (request_id, created_at, model, endpoint, status, http_status, prompt_tokens, "
        "cached_tokens, output_tokens, e2e_s, num_retries, qos_class, predicted_ttft_s) VALUES ('old', "
        "'2026-01-01 00:00:00', 'm', 'completions', 'rejected', 429, 3, 0, 0, 1, 0, 'gold', 0.5)",
        "INSERT INTO qos_classes (name, version, definition) VALUES ('gold', 3, '{}')",
    ),
    "0002": (
        "UPDATE class_revision SET revision = 3",
        "INSERT INTO latency_profiles (kind, measured_at, prefill, step) VALUES ('k', '2026-01-01 00:00:00', "
        "'[0, 1, 0]', '[0, 1, 0]')",
    ),
    "0003": (
        "INSERT INTO class_edits (revision, edited_at, name, version, definition, before) VALUES (3, "
        "'2026-01-01 00:00:00', 'gold', 3, '{}', NULL)",
    ),
    "0004": (
        "INSERT INTO measured_profiles (name, measured_at, profile) VALUES ('mine', '2026-01-01 00:00:00', '{}')",
    ),
    "0005": ("INSERT INTO admission_edits (version, edited_at, mode) VALUES (1, '2026-01-01 00:00:00', 'load')",),
}  # what a ledger has since each revision


@pytest.mark.parametrize("revision", sorted(OLD_ROWS))
async def test_rows_of_every_release_are_there_after_it(ledger_url: str, revision: str) -> None:
    engine = make_engine(ledger_url)
    async with engine.begin() as connection:
        await connection.run_sync(upgraded_to, revision)
        for since, statements in OLD_ROWS.items():
            for statement in statements if since <= revision else ():
                await connection.execute(text(statement))
    await engine.dispose()
    async with open_ledger(ledger_url) as ledger:
        (old,) = await ledger.recent(9)
        assert (old.request_id, old.status, old.refused_unread) == ("old", "rejected", None)
        assert (old.num_drafts, old.num_right_drafts) == (None, None)
        (outcome,) = await ledger.outcomes.since(BEFORE, "gold", 9)
        assert (outcome.predicted_ttft_s, outcome.refused_unread) == (0.5, None)
        assert [one.prompt_tokens for one in await ledger.traffic.since(BEFORE, 9)] == [3]
        stored = await ledger.classes.all()
        assert [(one.name, one.version) for one in stored.classes] == [("gold", 3)]
        assert stored.revision == (3 if revision >= "0002" else 0)
        assert len(await ledger.classes.edits(9)) == (revision >= "0003")
        assert [one.mode for one in await ledger.admission.newest(9)] == (["load"] if revision >= "0005" else [])
        ledger.record(row(2, refused_unread=True))
        await ledger.classes.put("gold", {"priority": 1}, 3, len)
    async with open_ledger(ledger_url) as again:
        assert [one.refused_unread for one in await again.recent(9)] == [True, None]


async def test_a_ledger_of_a_later_release_is_refused_and_left_alone(ledger_url: str) -> None:
    async with open_ledger(ledger_url):
        pass
    await execute(ledger_url, "UPDATE alembic_version SET version_num = '9999'")
    for _ in range(2):
        with pytest.raises(Incompatible, match=r"schema 9999.*a later release wrote it"):
            async with open_ledger(ledger_url):
                pass


async def test_gateways_that_start_together_do_it_once(ledger_url: str) -> None:
    statements = FIRST.format(**KINDS[ledger_url.split(":")[0]]).strip().split(";")
    await execute(ledger_url, *statements)
    command = (sys.executable, "-c", OPEN, ledger_url)
    other = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)

    async def open_one() -> None:
        async with open_ledger(ledger_url) as ledger:
            assert len(await ledger.recent(9)) == 1

    await asyncio.gather(*(open_one() for _ in range(5)))
    _, said = await other.communicate()
    assert (other.returncode, said) == (0, b"")


async def test_an_upgrade_waits_for_another_ones_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if SQLite's own wait for it ends many times meanwhile."""
    monkeypatch.setattr(sqlite, "_BUSY_MS", 1)
    file = tmp_path / "ledger.db"
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("PRAGMA journal_mode=WAL")
    holder.execute("BEGIN IMMEDIATE")
    tries = 0

    def counted(error: DBAPIError) -> bool:
        nonlocal tries
        tries += 1
        if tries == 5:
            holder.execute("ROLLBACK")
        return is_locked(error)

    monkeypatch.setattr(database, "is_locked", counted)
    async with open_ledger(f"sqlite:///{file}") as ledger:
        assert await ledger.recent(9) == []
    holder.close()
    assert tries >= 5


async def test_a_migration_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with sqlite3.connect(file) as connection:
        connection.execute("create table plans (id integer)")  # somebody else's: the second migration meets it
    connection.close()
    with pytest.raises(Exception, match="plans"):
        async with open_ledger(f"sqlite:///{file}"):
            pass
    with sqlite3.connect(file) as connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    connection.close()
    assert tables == {"plans"}


async def test_a_database_without_an_encoding_will_do(postgresql: PostgresqlServer) -> None:
    """As `initdb` makes it where no locale is set."""
    url = postgresql.new_database("ENCODING SQL_ASCII LOCALE 'C' TEMPLATE template0")
    async with open_ledger(url) as ledger:
        ledger.record(row(1))
    async with open_ledger(url) as again:
        assert [one.request_id for one in await again.recent(9)] == ["r1"]
