"""Deletes old requests from the ledger: in batches with pauses between them, so that no writer waits for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import Unavailable
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import RequestRow

log = logging.getLogger(__name__)

_BATCH_ROWS = 500  # locks a SQLite file for some milliseconds
_PAUSE_S = 0.2  # between batches
_INTERVAL_S = 600.0  # between rounds


class Retention:
    """Deletes requests. Owns nothing. Classes, their edits, profiles and plans are kept."""

    def __init__(self, database: Database, batch_rows: int = _BATCH_ROWS) -> None:
        self._database = database
        self._batch_rows = batch_rows

    async def forget_before(self, moment: datetime, pause_s: float = _PAUSE_S) -> int:
        """Deletes every request that arrived before `moment`; returns how many. Raises Unavailable.

        Several gateways may do so at once: none waits for another's batch.
        """
        num_deleted = 0
        while True:
            num = await self._delete_batch(moment)
            num_deleted += num
            if num < self._batch_rows:
                return num_deleted
            await asyncio.sleep(pause_s)

    @in_transaction
    async def _delete_batch(self, session: AsyncSession, moment: datetime) -> int:
        oldest = select(RequestRow.id).where(RequestRow.created_at < moment).limit(self._batch_rows)
        taken = oldest.with_for_update(skip_locked=True)  # not needed on SQLite, which has a single writer
        # in one statement: a SQLite transaction that reads first may find that it must not write
        gone = delete(RequestRow).where(RequestRow.id.in_(taken)).returning(RequestRow.id)
        return len((await session.execute(gone)).all())

    async def keep(self, days: float) -> None:
        """Runs forever, keeping `days` of requests; 0 keeps all."""
        if days:
            await forever(lambda: self.forget_before(datetime.now(UTC) - timedelta(days=days)), "requests")


async def forever(forget: Callable[[], Awaitable[int]], what: str, interval_s: float = _INTERVAL_S) -> None:
    """Calls `forget`, which returns how many rows went, again and again. While the database is away nothing goes."""
    while True:
        try:
            num_deleted = await forget()
            if num_deleted:
                log.info("ledger.forgot", extra={"num_rows": num_deleted, "what": what})
        except Unavailable as error:
            log.warning("ledger.kept", extra={"reason": error.message[:300]})
        except Exception as error:  # no driver error may end the loop
            log.error("ledger.kept", exc_info=error)
        await asyncio.sleep(interval_s)
