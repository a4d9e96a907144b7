"""The end of a database that somebody was still using."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, Pool, event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.util import await_only

from halfmoon.errors import Unavailable
from halfmoon.ledger.connection import transaction
from halfmoon.ledger.connection.database import open_database


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


async def test_who_goes_while_a_connection_is_given_back_leaves_no_traceback(
    ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = asyncio.all_tasks()

    async def work(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    async with open_database(ledger_url) as database:
        using = asyncio.create_task(database.run(work))

        def goes(*_: Any) -> None:
            using.cancel()

        event.listen(Pool, "reset", goes)
        try:
            await asyncio.wait({using})
        finally:
            event.remove(Pool, "reset", goes)
        assert using.cancelled()
        await database.run(work)
    assert caplog.records == []
    assert asyncio.all_tasks() == before


async def test_a_commit_that_never_ends_keeps_no_connection(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "ENDING_S", 0.0)

    async def work(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    def hangs(*_: Any) -> None:
        await_only(asyncio.Event().wait())

    async with open_database(ledger_url) as database:
        before = asyncio.all_tasks()
        event.listen(Engine, "commit", hangs)
        try:
            for _ in range(5):  # one more than there are connections
                with pytest.raises(Unavailable, match="did not answer"):
                    await database.run(work, deadline_s=0.1)
            left = asyncio.all_tasks() - before
            if left:
                await asyncio.wait(left, timeout=20)
            assert asyncio.all_tasks() == before
        finally:
            event.remove(Engine, "commit", hangs)
        await database.run(work)


async def test_threads_of_connections_cancelled_while_opened_have_ended_when_the_database_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    loop, opening = asyncio.get_running_loop(), asyncio.Event()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def slow(*args: Any, **options: Any) -> sqlite3.Connection:
        loop.call_soon_threadsafe(opening.set)
        time.sleep(0.2)  # much longer than closing the others takes
        return connect(*args, **options)

    async def work(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    async with open_database(f"sqlite:///{tmp_path / 'ledger.db'}") as database:
        monkeypatch.setattr(sqlite3, "connect", slow)
        using = [asyncio.create_task(database.run(work)) for _ in range(4)]
        await opening.wait()
        for one in using:
            one.cancel()
        await asyncio.wait(using)
    assert not {thread for thread in set(threading.enumerate()) - before if "connection" in thread.name}


async def test_a_cancelled_statement_leaves_no_lock(ledger_url: str) -> None:
    """Not even until the garbage collector finds its cursor."""

    async def make(session: AsyncSession) -> None:
        await session.execute(text("CREATE TABLE numbers (number INTEGER)"))
        await session.execute(text("INSERT INTO numbers VALUES (1), (2)"))

    async def add(session: AsyncSession) -> list[int]:
        added = await session.scalars(text("UPDATE numbers SET number = number + 10 RETURNING number"))
        return list(added)

    async with open_database(ledger_url) as database:
        await database.run(make)
        using = asyncio.create_task(database.run(add))

        def cancels(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if "RETURNING" in statement:
                for task in asyncio.all_tasks() - {main}:
                    task.cancel()

        main = asyncio.current_task()
        event.listen(Engine, "before_cursor_execute", cancels)
        gc.disable()
        try:
            await asyncio.wait({using})
            event.remove(Engine, "before_cursor_execute", cancels)
            assert using.cancelled()
            assert sorted(await database.run(add)) == [11, 12]
        finally:
            gc.enable()
