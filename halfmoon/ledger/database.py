"""The connections to the ledger's database, SQLite or PostgreSQL: every use of them has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.ledger.sqlite import DriverThreads, OpenedFile, sqlite_engine
from halfmoon.ledger.transaction import Result, Transaction, Work
from halfmoon.ledger.upgrade import is_current, upgrade

GiveUp = Callable[[asyncio.Task[Any]], Any]

DEADLINE_S = 5.0
_OPEN_S = 20.0  # another gateway may be migrating
_CLOSE_S = 2.0
_POOL_SIZE = 4
_POSTGRESQL_ARGS: Mapping[str, Any] = {  # a host that vanished is missed within half a minute
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "halfmoon",
}
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}


class Database:
    """Owns the connections. Knows nothing of what is in the tables."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._threads = DriverThreads(engine) if self.is_file else None
        self._is_current = False  # the tables are as this release has them
        self._file: OpenedFile | None = None  # of SQLite, once it is there
        self._overdue: set[asyncio.Task[Any]] = set()  # given up, and not ended yet: a driver may take its time

    @property
    def is_file(self) -> bool:
        """Whether it is one of this host."""
        return self._engine.dialect.name == "sqlite"

    async def run(self, work: Work[Result], deadline_s: float | None = DEADLINE_S) -> Result:
        """`work` in one transaction. Raises Unavailable when the database does not answer within the deadline.

        Other errors of SQLAlchemy mean that the work itself is wrong. Whether a transaction over its deadline was
        committed is not known.
        """
        if not self._is_current:
            raise Unavailable("the ledger's database was not reached yet")
        if self._file is not None:
            self._file.check()
        transaction = Transaction(self._engine, work)
        return await self._within(transaction.run(), deadline_s, transaction.give_up)

    async def upgrade(self) -> None:
        """Brings the tables to the newest revision: before that nothing can be done here. Nothing, where it was done.

        Raises Unavailable; Incompatible for tables of a later release.
        """
        if not self._is_current:
            await self._within(self._upgrade(), _OPEN_S)
            self._file = OpenedFile(self._engine) if self.is_file else None
            self._is_current = True

    async def close(self) -> None:
        """Closes the connections; those that do not answer are left to the operating system.

        Transactions that were given up end first: one whose connection is closed meanwhile may wait for ever.
        """
        if self._overdue:
            await asyncio.wait(self._overdue, timeout=_CLOSE_S)
        try:
            await self._within(self._engine.dispose(), _CLOSE_S)
        except Unavailable:
            await self._engine.dispose(close=False)
        if self._threads is not None:
            await self._threads.ended()

    async def _within(
        self, working: Coroutine[Any, Any, Result], deadline_s: float | None, give_up: GiveUp = asyncio.Task.cancel
    ) -> Result:
        """A driver that ignores cancellation holds nobody up: what does not end is left behind."""
        task = asyncio.create_task(working)
        try:
            await asyncio.wait({task}, timeout=deadline_s)
        finally:
            if not task.done():
                give_up(task)
                self._overdue.add(task)
                task.add_done_callback(self._forget)
        if not task.done():
            raise Unavailable(f"the ledger's database did not answer within {deadline_s:g} s")
        return _result(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._overdue.discard(task)
        if not task.cancelled():
            task.exception()  # nobody waits for it

    async def _upgrade(self) -> None:
        async with self._engine.connect() as connection:
            if await connection.run_sync(is_current):
                return
        async with self._engine.connect() as connection:
            writing = await connection.execution_options(sqlite_begin="IMMEDIATE")
            async with writing.begin():
                await writing.run_sync(upgrade)


@asynccontextmanager
async def open_database(url: str, *, may_be_away: bool = False) -> AsyncIterator[Database]:
    """The database at `url`, with tables of the newest revision.

    Raises InvalidRequest for a URL that cannot be used, Unavailable for a database that is not there, and Incompatible
    for one that a later release wrote. A server that `may_be_away` raises Unavailable with each use, until somebody
    calls `upgrade` with success; a file is never away.
    """
    database = Database(make_engine(url))
    try:
        try:
            await database.upgrade()
        except Unavailable as error:
            if database.is_file:
                raise Unavailable(f"{error.message} (the ledger is {mask_password(url)})") from error
            if not may_be_away:
                raise
        yield database
    finally:
        await database.close()


def mask_password(url: str) -> str:
    """The URL as it may be logged; a text that is no URL is not shown at all."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "not a URL"


def make_engine(given: str) -> AsyncEngine:
    """Connects to nothing yet. Raises InvalidRequest for a URL that cannot be used."""
    url = _with_driver(given)
    try:
        if url.get_backend_name() == "sqlite":
            return sqlite_engine(url)
        args = {name: value for name, value in _POSTGRESQL_ARGS.items() if name not in url.query}
        return create_async_engine(
            url, pool_size=_POOL_SIZE, max_overflow=0, pool_timeout=DEADLINE_S, pool_pre_ping=True, connect_args=args
        )
    except ModuleNotFoundError as error:
        what = "PostgreSQL needs psycopg: pip install 'halfmoon[postgresql]'" if error.name == "psycopg" else str(error)
        raise _unusable(what) from error
    except (ArgumentError, TypeError) as error:
        raise _unusable(str(error)) from error


def _with_driver(given: str) -> URL:
    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:
        raise _unusable(str(error)) from error
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise _unusable("it must begin with sqlite:// or postgresql://")
    return url.set(drivername=driver)


def _unusable(why: str) -> InvalidRequest:
    return InvalidRequest(f"the ledger's URL cannot be used: {why}", param="ledger_url")


def _result(task: asyncio.Future[Result]) -> Result:
    """Raises Unavailable for what time may mend."""
    try:
        return task.result()
    except (PoolTimeout, OSError) as error:
        raise Unavailable(f"the ledger's database does not answer: {error}") from error
    except DBAPIError as error:
        if error.connection_invalidated or _is_operational(error):
            raise Unavailable(f"the ledger's database does not answer: {_first_line(error)}") from error
        raise


def _is_operational(error: DBAPIError) -> bool:
    return type(error).__name__ in ("OperationalError", "InterfaceError", "InternalError")


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).partition("\n")[0]
