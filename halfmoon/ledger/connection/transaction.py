"""One transaction, which may be given up while its work runs, but not while its connection is being returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

Result = TypeVar("Result")
Work = Callable[[AsyncSession], Awaitable[Result]]


ENDING_S = 5.0


class Transaction(Generic[Result]):
    """Owns whether the work is done.

    What follows, commit or rollback and the pool's reset, should end by itself: cancelling it discards the connection,
    with a traceback by the pool. A database that does not finish even that within `ENDING_S` is dead, and loses its
    place in the pool.
    """

    def __init__(self, engine: AsyncEngine, work: Work[Result]) -> None:
        self._engine = engine
        self._work = work
        self._is_ending = False

    async def run(self) -> Result:
        """Commits the changes of `work`, or rolls them back when it raises."""
        async with AsyncSession(self._engine, expire_on_commit=False) as session, session.begin():
            try:
                return await self._work(session)
            finally:
                self._is_ending = True

    def give_up(self, running: asyncio.Task[Any]) -> None:
        """Gives up `running`, the task that runs this transaction."""
        if self._is_ending:
            last = running.get_loop().call_later(ENDING_S, running.cancel)
            running.add_done_callback(lambda _: last.cancel())
        else:
            running.cancel()


def quietly(statement: Any) -> Any:
    """A statement of many rows, for a session that holds no objects which it would have to bring up to date."""
    return statement.execution_options(synchronize_session=False)
