"""The connections to the ledger's database, SQLite or PostgreSQL: every use of them has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.ledger.connection.postgresql import postgresql_engine
from halfmoon.ledger.connection.sqlite import CommitWatch, DriverThreads, OpenedFile, is_locked, sqlite_engine
from halfmoon.ledger.connection.transaction import Result, Transaction, Work
from halfmoon.ledger.connection.upgrade import is_current, upgrade

GiveUp = Callable[[asyncio.Task[Any]], Any]

DEADLINE_S = 5.0
_OPEN_S = 20.0  # another gateway may be migrating
_CLOSE_S = 2.0
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}


class Database:
    """Owns the connections. Knows nothing of the tables' content."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._threads = DriverThreads(engine) if self.is_file else None
        self._is_current = False  # the tables have this release's schema
        self._absence = "the ledger's database was not reached yet"
        self._file: OpenedFile | None = None  # for SQLite, once it is open
        self._commits: CommitWatch | None = None  # of that file
        self._overdue: set[asyncio.Task[Any]] = set()  # given up but not ended: a driver may take its time

    @property
    def is_file(self) -> bool:
        """Whether the database is a file on this host."""
        return self._engine.dialect.name == "sqlite"

    async def run(self, work: Work[Result], deadline_s: float | None = DEADLINE_S) -> Result:
        """Runs `work` in one transaction. Raises Unavailable when the database does not answer within the deadline.

        Other errors of SQLAlchemy mean that the work itself is wrong. A transaction over its deadline may or may not
        have been committed.
        """
        self._check()
        transaction = Transaction(self._engine, work)
        return await self._within(transaction.run(), deadline_s, transaction.give_up)

    def commit_mark(self) -> int | None:
        """A number that is another one after any commit, by whomever; None where only a transaction can tell.

        What a transaction read that began after this call holds as long as the number stays. Raises Unavailable.
        """
        self._check()
        return None if self._commits is None else self._commits.mark()

    async def upgrade(self) -> None:
        """Upgrades the tables to the newest revision, before which nothing else works. No-op once it was done.

        Raises Unavailable; Incompatible for tables of a later release.
        """
        if not self._is_current:
            try:
                await self._within(self._upgrade(), _OPEN_S)
            except Unavailable as error:
                self._absence = error.message
                raise
            self._file = OpenedFile(self._engine) if self.is_file else None
            if self._file is not None and self._file.path is not None:
                self._commits = CommitWatch(self._file.path)
            self._is_current = True

    async def close(self) -> None:
        """Closes the connections; those that do not answer are left to the operating system.

        Abandoned transactions end first: one whose connection is closed meanwhile may wait forever.
        """
        if self._commits is not None:
            self._commits.close()
            self._commits = None
        if self._overdue:
            await asyncio.wait(self._overdue, timeout=_CLOSE_S)
        try:
            await self._within(self._engine.dispose(), _CLOSE_S)
        except Unavailable:
            await self._engine.dispose(close=False)
        if self._threads is not None:
            await self._threads.ended()

    def _check(self) -> None:
        """Raises Unavailable, with the reason, if there is nothing to read yet, or not any more."""
        if not self._is_current:
            raise Unavailable(self._absence)
        if self._file is not None:
            self._file.check()

    async def _within(
        self, working: Coroutine[Any, Any, Result], deadline_s: float | None, give_up: GiveUp = asyncio.Task.cancel
    ) -> Result:
        """Awaits `working` within the deadline; a driver that ignores cancellation is left behind."""
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
            task.exception()  # no one awaits it

    async def _upgrade(self) -> None:
        """Waits for another process that migrates a file: SQLite itself gives up on its lock much sooner."""
        while True:
            try:
                return await self._upgrade_once()
            except DBAPIError as error:
                if not is_locked(error):
                    raise

    async def _upgrade_once(self) -> None:
        async with self._engine.connect() as connection:
            if await connection.run_sync(is_current):
                return
        async with self._engine.connect() as connection:
            writing = await connection.execution_options(sqlite_begin="IMMEDIATE")
            async with writing.begin():
                await writing.run_sync(upgrade)


class _HasDatabase(Protocol):
    _database: Database


Owner = TypeVar("Owner", bound=_HasDatabase)
Arguments = ParamSpec("Arguments")


def in_transaction(
    method: Callable[Concatenate[Owner, AsyncSession, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Result]]:
    """A method that is called without its session, and runs in one transaction of its object's `_database`.

    It raises what `Database.run` raises.
    """

    @wraps(method)
    async def run(owner: Owner, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        return await owner._database.run(lambda session: method(owner, session, *args, **options))

    return run


@asynccontextmanager
async def open_database(url: str, *, may_be_away: bool = False) -> AsyncIterator[Database]:
    """The database at `url`, with tables of the newest revision.

    Raises InvalidRequest for an unusable URL or file, Unavailable for an absent database, and Incompatible for one that
    a later release wrote. With `may_be_away`, an absent server raises Unavailable with each use until `upgrade`
    succeeds; a file is never away.
    """
    database = Database(make_engine(url))
    try:
        try:
            await database.upgrade()
        except Unavailable as error:
            if database.is_file:
                raise Unavailable(f"{error.message} (the ledger is {make_url(url)!r})") from error
            if not may_be_away:
                raise
        except DBAPIError as error:
            why = f"the ledger's database cannot be used: {_first_line(error)} (the ledger is {make_url(url)!r})"
            raise InvalidRequest(why, param="ledger_url") from error
        yield database
    finally:
        await database.close()


def make_engine(given: str) -> AsyncEngine:
    """Makes an engine without connecting. Raises InvalidRequest for an unusable URL."""
    url = _with_driver(given)
    try:
        if url.get_backend_name() == "sqlite":
            return sqlite_engine(url)
        return postgresql_engine(url, DEADLINE_S)
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
    """The result of a task. Raises Unavailable for errors that time may mend."""
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
