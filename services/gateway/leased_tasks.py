"""What this gateway works on without a connection: leased from the ledger, renewed, and given back at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.ledger.kept.leases import Leases

log = logging.getLogger(__name__)

POLL_S = 2.0  # also how soon an end by another gateway is noticed


class LeasedTasks:
    """Owns the tasks. Each works on one row, until it is done or the lease is gone."""

    def __init__(self, leases: Leases, holder: str, most: int, run: Callable[[str], Awaitable[None]]) -> None:
        """`most`: how many run at once; `run` is given a row's id."""
        self._leases = leases
        self._holder = holder
        self._most = most
        self._run = run
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Says that there is a new row."""
        self._wake.set()

    def end(self, row_id: str) -> None:
        """Ends the work on a row, if it is done here."""
        task = self._tasks.get(row_id)
        if task is not None:
            task.cancel()

    async def follow(self) -> None:
        """Takes rows and works on them, forever. Those that are not done when it is cancelled are left to others."""
        is_away = False
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                    is_away = False
                except Unavailable as error:
                    if not is_away:  # once an outage
                        log.warning("leases.unread", extra={"reason": error.message})
                    is_away = True
                except Exception:  # no content of a ledger may end this loop
                    log.exception("leases.failed")
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._wake.wait()
        finally:
            for task in list(self._tasks.values()):
                await cancelled(task)
            with suppress(HalfmoonError):
                await self._leases.release(self._holder, datetime.now(UTC))

    async def _look(self) -> None:
        now = datetime.now(UTC)
        held = await self._leases.renew(self._tasks.keys(), self._holder, now)
        for row_id in self._tasks.keys() - set(held):
            self.end(row_id)
        for row_id in await self._leases.claim(self._holder, now, self._most - len(self._tasks)):
            if row_id not in self._tasks:  # else it is ending, and this lease ends unused
                self._tasks[row_id] = asyncio.create_task(self._work(row_id))

    async def _work(self, row_id: str) -> None:
        try:
            await self._run(row_id)
            await self._leases.release(self._holder, datetime.now(UTC), row_id)
        except Exception:  # the lease ends, and somebody tries again
            log.exception("leases.failed", extra={"row_id": row_id})
        finally:
            del self._tasks[row_id]
            self._wake.set()  # there is room for another
