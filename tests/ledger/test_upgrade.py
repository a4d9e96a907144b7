"""Ledgers of every earlier release are brought up to date, by however many gateways start; later ones are refused."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from halfmoon.errors import Incompatible
from halfmoon.ledger.database import Database, make_engine, open_database
from halfmoon.ledger.ledger import open_ledger
from halfmoon.ledger.models import Base
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
