"""Leases of work that one gateway at a time does: background responses and batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.database import Database
from halfmoon.ledger.models import BatchRow, StoredResponseRow
from halfmoon.ledger.transaction import quietly

LeasedRow: TypeAlias = type[StoredResponseRow] | type[BatchRow]


class Leases:
    """Leases the rows of one table to gateways. Owns nothing. Time is an argument, by the clock of the caller.

    Whoever writes a result names itself as the holder, so that one whose lease has ended changes nothing. All methods
    raise Unavailable when the database does not answer.
    """

    def __init__(self, database: Database, table: LeasedRow, unfinished: Collection[str], lease_s: float) -> None:
        """`unfinished` are the statuses of rows that somebody has to work on."""
        self._database = database
        self._table = table
        self._unfinished = tuple(unfinished)
        self._lease = timedelta(seconds=lease_s)

    async def claim(self, holder: str, now: datetime, most: int) -> Sequence[str]:
        """Leases up to `most` rows that nobody holds, oldest first; returns their ids."""
        table = self._table
        free = (table.status.in_(self._unfinished), or_(table.leased_until.is_(None), table.leased_until < now))
        oldest = select(table.id).where(*free).order_by(table.created_at, table.id).limit(most)
        taken = oldest.with_for_update(skip_locked=True)  # not needed on SQLite, which has a single writer
        claimed = (
            update(table)
            .where(table.id.in_(taken), *free)
            .values(holder=holder, leased_until=now + self._lease, num_claims=table.num_claims + 1)
            .returning(table.id)
        )

        async def work(session: AsyncSession) -> list[str]:
            return list(await session.scalars(quietly(claimed)))

        return await self._database.run(work) if most > 0 and await self._any(free) else ()

    async def renew(self, ids: Collection[str], holder: str, now: datetime) -> Sequence[str]:
        """Renews leases; returns the ids of those that still are held and unfinished."""
        table = self._table
        mine = (table.id.in_(list(ids)), table.holder == holder, table.status.in_(self._unfinished))
        renewed = update(table).where(*mine).values(leased_until=now + self._lease).returning(table.id)

        async def work(session: AsyncSession) -> list[str]:
            return list(await session.scalars(quietly(renewed)))

        return await self._database.run(work) if ids else ()

    async def release(self, ids: Collection[str], holder: str) -> None:
        """Ends leases, so that another gateway goes on at once."""
        table = self._table
        mine = update(table).where(table.id.in_(list(ids)), table.holder == holder)
        released = mine.values(holder=None, leased_until=None)

        async def work(session: AsyncSession) -> None:
            await session.execute(quietly(released))

        if ids:
            await self._database.run(work)

    async def _any(self, free: Sequence[ColumnElement[bool]]) -> bool:
        """Whether there is anything to claim, without locking out writers."""

        async def work(session: AsyncSession) -> bool:
            return await session.scalar(select(self._table.id).where(*free).limit(1)) is not None

        return await self._database.run(work)
