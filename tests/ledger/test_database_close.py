"""The end of a database that somebody was still using."""

from __future__ import annotations

import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.database import open_database


async def test_cancelled_transactions_are_over_when_the_database_is_closed(ledger_url: str) -> None:
    before = asyncio.all_tasks()
    reached = asyncio.Event()

    async def work(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        reached.set()
        await asyncio.Event().wait()

    async with open_database(ledger_url) as database:
        using = asyncio.create_task(database.run(work))
        await reached.wait()
        using.cancel()
        await asyncio.wait({using})
    assert asyncio.all_tasks() == before
