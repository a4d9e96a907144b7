"""Old requests leave the ledger, in both databases, whoever else does the same."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from halfmoon.background import running
from halfmoon.ledger.connection.database import open_database
from halfmoon.ledger.history.retention import Retention
from halfmoon.ledger.ledger import open_ledger
from tests.ledger.rows import row

NOW = datetime(2026, 6, 1, tzinfo=UTC)


async def filled(url: str, num_old: int, num_new: int) -> None:
    async with open_ledger(url) as ledger:
        for number in range(num_old + num_new):
            age = timedelta(days=40) if number < num_old else timedelta(days=20)
            ledger.record(row(number, created_at=NOW - age))


async def left(url: str) -> list[str]:
    async with open_ledger(url) as ledger:
        return [one.request_id for one in await ledger.recent(100)]


async def test_what_is_older_goes_in_batches_and_the_rest_stays(ledger_url: str) -> None:
    await filled(ledger_url, 25, 3)
    async with open_database(ledger_url) as database:
        retention = Retention(database, batch_rows=10)
        assert await retention.forget_before(NOW - timedelta(days=30), pause_s=0) == 25
        assert await retention.forget_before(NOW - timedelta(days=30), pause_s=0) == 0
    assert await left(ledger_url) == ["r27", "r26", "r25"]


async def test_several_at_once_delete_each_row_once(ledger_url: str) -> None:
    await filled(ledger_url, 60, 2)
    async with open_database(ledger_url) as one, open_database(ledger_url) as other:
        forgetting = (Retention(base, 10).forget_before(NOW - timedelta(days=30), 0) for base in (one, other))
        await asyncio.gather(*forgetting)
    assert await left(ledger_url) == ["r61", "r60"]


async def test_rows_are_deleted_while_the_ledger_is_in_use(ledger_url: str) -> None:
    await filled(ledger_url, 5, 0)
    async with open_ledger(ledger_url) as ledger, running(ledger.retention.keep(30)):
        ledger.record(row(7, created_at=datetime.now(UTC)))
        async with asyncio.timeout(20):
            while [one.request_id for one in await ledger.recent(9)] != ["r7"]:  # nobody tells of it
                pass


async def test_for_ever(ledger_url: str) -> None:
    await filled(ledger_url, 2, 0)
    async with open_ledger(ledger_url) as ledger:
        await ledger.retention.keep(0)
    assert len(await left(ledger_url)) == 2
