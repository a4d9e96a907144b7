"""Old requests leave the ledger: in batches with pauses between them, so that nobody who writes waits for long."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import Unavailable
from halfmoon.ledger.database import Database
from halfmoon.ledger.models import RequestRow

log = logging.getLogger(__name__)

_BATCH_ROWS = 500  # some milliseconds in which a SQLite file is locked
_PAUSE_S = 0.2  # between batches
_INTERVAL_S = 600.0  # between rounds


class Retention:
    """Deletes requests. Owns nothing. Classes, their edits, profiles and plans stay."""

    def __init__(self, database: Database, batch_rows: int = _BATCH_ROWS) -> None:
        self._database = database
        self._batch_rows = batch_rows

    async def forget_before(self, moment: datetime, pause_s: float = _PAUSE_S) -> int:
        """Deletes every request that came before `moment`; how many. Raises Unavailable.

        Several gateways may do so at once: none waits for another's batch.
        """
        num_deleted = 0
        while True:
            num = await self._delete_batch(moment)
            num_deleted += num
            if num < self._batch_rows:
                return num_deleted
            await asyncio.sleep(pause_s)

    async def _delete_batch(self, moment: datetime) -> int:
        oldest = select(RequestRow.id).where(RequestRow.created_at < moment).limit(self._batch_rows)
        taken = oldest.with_for_update(skip_locked=True)  # which SQLite does without: it has one writer

        async def work(session: AsyncSession) -> int:
            """In one statement: a transaction of SQLite that reads first may find that it must not write."""
            gone = delete(RequestRow).where(RequestRow.id.in_(taken)).returning(RequestRow.id)
            return len((await session.execute(gone)).all())

        return await self._database.run(work)

    async def keep(self, days: float) -> None:
        """For ever; with 0 days everything is kept. While the database is away nothing is deleted."""
        while days:
            try:
                num_deleted = await self.forget_before(datetime.now(UTC) - timedelta(days=days))
                if num_deleted:
                    log.info("ledger.forgot", extra={"num_rows": num_deleted, "days": days})
            except Unavailable as error:
                log.warning("ledger.kept", extra={"reason": error.message[:300]})
            except Exception as error:  # whatever a driver raises must not end it
                log.error("ledger.kept", exc_info=error)
            await asyncio.sleep(_INTERVAL_S)
