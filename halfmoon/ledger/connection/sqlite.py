"""SQLite as the ledger's database: opening its connections, and waiting for the last of their threads."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakSet

import aiosqlite
from sqlalchemy import URL, Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from halfmoon.errors import Unavailable

_BUSY_MS = 2_000
_END_S = 5.0  # longer than the wait for another connection's lock


class DriverThreads:
    """The threads of an engine's connections: each connection of aiosqlite is one.

    Neither the driver nor SQLAlchemy waits for the thread of a connection that was cancelled while being opened or
    closed; a thread that outlives its event loop fails when it has a result to deliver.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._threads: WeakSet[Thread] = WeakSet()  # running ones are held by the interpreter
        event.listen(engine.sync_engine, "do_connect", self._connect_here)

    async def ended(self) -> None:
        """Returns when all have ended, or after five seconds: SQLite's work has no upper bound."""
        running = [thread for thread in self._threads if thread.is_alive()]
        if running:
            await asyncio.to_thread(_join, running, _END_S)

    def _connect_here(self, dialect: Any, record: Any, args: Any, options: dict[str, Any]) -> None:
        options["async_creator_fn"] = self._connect

    def _connect(self, *args: Any, **options: Any) -> aiosqlite.Connection:
        connection = aiosqlite.connect(*args, factory=_DriverConnection, **options)
        connection._thread.daemon = True  # like SQLAlchemy's own connections
        self._threads.add(connection._thread)
        return connection


class _DriverConnection(sqlite3.Connection):
    """Ends its transaction before it closes.

    SQLite keeps a closed connection, and its locks, until its last statement is finalized. A cancelled `RETURNING`
    or `SELECT` leaves its statement to the garbage collector.
    """

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()
        super().close()


class OpenedFile:
    """Owns the identity of the opened file: SQLite keeps writing to one that was deleted."""

    def __init__(self, engine: AsyncEngine) -> None:
        """The file that is present now; none for a database in memory. Raises Unavailable if it is absent."""
        database = engine.url.database
        self._path = Path(database) if database and not _is_special(database) else None
        self._opened = self._present()

    @property
    def path(self) -> Path | None:
        """The file; None for a database in memory."""
        return self._path

    def check(self) -> None:
        """Raises Unavailable if the file is gone or was replaced."""
        if self._present() != self._opened:
            raise Unavailable(
                f"the ledger's file {self._path} was replaced while it was open: restart the gateway to use the new one"
            )

    def _present(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError as error:
            raise Unavailable(
                f"the ledger's file {self._path} is not there any more ({error.strerror}): put it back, or restart the "
                "gateway to begin a new one"
            ) from error
        return stat.st_dev, stat.st_ino


class CommitWatch:
    """Owns a connection that only looks whether others have committed. It takes no transaction's time and no lock's."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None)

    def mark(self) -> int | None:
        """A number that is another one after any commit to the file; None while that cannot be told.

        Reads shared memory, so the event loop may call it.
        """
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchall()[0][0])
        except sqlite3.Error:  # another process recovers the file, or it is damaged: whoever reads it will say
            return None

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def is_locked(error: DBAPIError) -> bool:
    """Whether another connection's lock was waited for in vain."""
    return isinstance(error.orig, sqlite3.OperationalError) and error.orig.sqlite_errorcode == sqlite3.SQLITE_BUSY


def _is_special(database: str) -> bool:
    """Whether the database is in memory, or a URI."""
    return database.startswith((":", "file:"))


def _join(threads: Iterable[Thread], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def sqlite_engine(url: URL) -> AsyncEngine:
    """Makes the engine, and a file and directory of the owner alone. Raises Unavailable if the directory fails."""
    if url.database and not _is_special(url.database):
        try:
            Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"the ledger's directory cannot be made: {error}") from error
        with suppress(OSError):  # the first use tells
            Path(url.database).touch(mode=0o600)
    engine = create_async_engine(url)
    event.listen(engine.sync_engine, "connect", _tune)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _tune(connection: Any, record: Any) -> None:
    """Sets WAL mode: readers never block the writer; a crash may lose the last rows, never the file."""
    connection.isolation_level = None  # `_begin` begins transactions, also those with DDL
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'DEFERRED')}")
