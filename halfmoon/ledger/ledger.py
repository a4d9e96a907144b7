"""The ledger's shell: rows are written behind the requests, by one background task, in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.ledger.classes import StoredClasses
from halfmoon.ledger.models import Base, RequestRow

log = logging.getLogger(__name__)

_MAX_QUEUED = 10_000
_MAX_BATCH = 500
_TRIES = 3


class Ledger:
    """Owns the rows that are not written yet. A failing database is logged and counted; it never fails a request."""

    def __init__(self, engine: Engine, max_queued: int = _MAX_QUEUED, retry_wait_s: float = 0.2) -> None:
        self.classes = StoredClasses(engine)
        self._engine = engine
        self._retry_wait_s = retry_wait_s
        self._queue: asyncio.Queue[RequestRow | None] = asyncio.Queue(max_queued)
        self._closing = False
        self.num_written = 0
        self.num_lost = 0

    def record(self, row: RequestRow) -> bool:
        """Accepts a row to write later. False, and counted as lost, when too many are waiting."""
        assert not self._closing
        try:
            self._queue.put_nowait(row)
        except asyncio.QueueFull:
            self.num_lost += 1
            log.error("ledger.full", extra={"num_lost": self.num_lost})
            return False
        return True

    async def recent(self, limit: int) -> list[RequestRow]:
        """The newest written rows, newest first. Raises Unavailable when the database does not answer."""
        try:
            return await asyncio.to_thread(self._select, limit)
        except SQLAlchemyError as error:
            raise Unavailable("the ledger's database does not answer") from error

    async def write_behind(self) -> None:
        """Writes what comes until `close`, then what is left."""
        while rows := await self._next_batch():
            await self._write(rows)

    def close(self) -> None:
        """No more rows: `write_behind` returns after the last one."""
        self._closing = True
        with suppress(asyncio.QueueFull):  # a writer with that much to do needs no waking
            self._queue.put_nowait(None)

    async def _next_batch(self) -> list[RequestRow]:
        """At least one row; empty at the end."""
        if self._closing and self._queue.empty():
            return []
        found = [await self._queue.get()]
        while len(found) < _MAX_BATCH and not self._queue.empty():
            found.append(self._queue.get_nowait())
        return [row for row in found if row is not None]  # None only wakes the writer, and is the last

    async def _write(self, rows: Sequence[RequestRow]) -> None:
        """A few tries: most failures of a database are short."""
        values = [_values(row) for row in rows]
        for number in range(1, _TRIES + 1):
            try:
                await asyncio.to_thread(self._insert, values)
            except Exception as error:  # a driver may raise its own; rows that fail must not stop those after them
                log.error("ledger.failed", extra={"num_rows": len(rows), "try": number, "reason": str(error)[:300]})
                if number < _TRIES:
                    await asyncio.sleep(self._retry_wait_s)
            else:
                self.num_written += len(rows)
                return
        self.num_lost += len(rows)

    def _insert(self, values: list[dict[str, Any]]) -> None:
        with Session(self._engine) as session, session.begin():
            session.add_all(RequestRow(**one) for one in values)

    def _select(self, limit: int) -> list[RequestRow]:
        with Session(self._engine, expire_on_commit=False) as session:
            return list(session.scalars(select(RequestRow).order_by(RequestRow.id.desc()).limit(limit)))


@asynccontextmanager
async def open_ledger(url: str) -> AsyncIterator[Ledger]:
    """A ledger at `url`, its tables created where absent; everything accepted is written when the block ends.

    Raises InvalidRequest for a URL that is none and Unavailable for a database that is not there.
    """
    engine = _engine(url)
    try:
        await asyncio.to_thread(_create_tables, engine, url)
        ledger = Ledger(engine)
        writer = asyncio.create_task(ledger.write_behind())  # no group: that would cancel it when the block fails
        try:
            yield ledger
        finally:
            ledger.close()
            await writer
    finally:
        await asyncio.to_thread(engine.dispose)


def mask_password(url: str) -> str:
    """The URL as it may be logged; a text that is no URL is not shown at all."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "not a URL"


def _engine(url: str) -> Engine:
    try:
        engine = create_engine(make_url(url), pool_pre_ping=True)
    except (ArgumentError, ModuleNotFoundError) as error:
        raise InvalidRequest(f"the ledger's URL cannot be used: {error}", param="ledger_url") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
    return engine


def _tune_sqlite(connection: Any, record: Any) -> None:
    """Readers and the one writer do not block each other; a crash may lose the last rows, never the file."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=2000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _create_tables(engine: Engine, url: str) -> None:
    database = make_url(url).database
    if engine.dialect.name == "sqlite" and database:
        Path(database).parent.mkdir(parents=True, exist_ok=True)
    try:
        Base.metadata.create_all(engine)
        _add_missing_columns(engine)
    except SQLAlchemyError as error:
        raise Unavailable(f"the ledger's database cannot be opened: {error}") from error


def _add_missing_columns(engine: Engine) -> None:
    """A ledger of an earlier version gets the columns that are new; older rows have no value there."""
    with engine.begin() as connection:
        for table in Base.metadata.sorted_tables:
            present = {column["name"] for column in inspect(connection).get_columns(table.name)}
            for column in table.columns:
                if column.name not in present:
                    kind = column.type.compile(engine.dialect)
                    connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}"))


def _values(row: RequestRow) -> dict[str, Any]:
    values = row.as_dict()
    del values["id"]
    return values
