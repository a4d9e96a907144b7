"""One transaction, which may be given up as long as its work goes on, and not while its connection is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

Result = TypeVar("Result")
Work = Callable[[AsyncSession], Awaitable[Result]]


ENDING_S = 5.0


class Transaction(Generic[Result]):
    """Owns whether the work is done. What comes then, commit or rollback and the pool's reset, should end by itself:
    a cancellation there throws the connection away, with a traceback by the pool. A database that does not even do that
    within `ENDING_S` is dead, and keeps no place in the pool."""

    def __init__(self, engine: AsyncEngine, work: Work[Result]) -> None:
        self._engine = engine
        self._work = work
        self._is_ending = False

    async def run(self) -> Result:
        """Commits what `work` did, or takes it back when that raises."""
        async with AsyncSession(self._engine, expire_on_commit=False) as session, session.begin():
            try:
                return await self._work(session)
            finally:
                self._is_ending = True

    def give_up(self, running: asyncio.Task[Any]) -> None:
        """Nobody waits for `running`, which runs it."""
        if self._is_ending:
            last = running.get_loop().call_later(ENDING_S, running.cancel)
            running.add_done_callback(lambda _: last.cancel())
        else:
            running.cancel()
