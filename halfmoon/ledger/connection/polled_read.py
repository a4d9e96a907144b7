"""A read that somebody repeats every second or two, mostly for nothing."""

from __future__ import annotations

from typing import Generic

from halfmoon.ledger.connection.database import Database
from halfmoon.ledger.connection.transaction import Result, Work


class PolledRead(Generic[Result]):
    """Owns what was read last. While nobody has committed since, that is the answer, without a transaction.

    Only SQLite says so without one: on PostgreSQL each poll is a read.
    """

    def __init__(self, database: Database, work: Work[Result]) -> None:
        self._database = database
        self._work = work
        self._last: tuple[int, Result] | None = None

    async def result(self) -> Result:
        """What `work` reads now. Raises Unavailable when the database does not answer."""
        mark = self._database.commit_mark()  # first: what is committed meanwhile is then read again, never missed
        if mark is not None and self._last is not None and self._last[0] == mark:
            return self._last[1]
        result = await self._database.run(self._work)
        self._last = None if mark is None else (mark, result)
        return result
