"""Leases of work that one gateway at a time does: background responses and batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.connection.polled_read import PolledRead
from halfmoon.ledger.connection.transaction import quietly
from halfmoon.ledger.models import BatchRow, StoredResponseRow

LeasedRow: TypeAlias = type[StoredResponseRow] | type[BatchRow]


class Leases:
    """Leases the rows of one table to gateways. Owns nothing. Time is an argument, by the clock of the caller.

    Whoever writes a result names itself as the holder, so that one whose lease has ended changes nothing. All methods
    raise Unavailable when the database does not answer.
    """

    def __init__(
        self,
        database: Database,
        table: LeasedRow,
        is_unfinished: ColumnElement[bool],
        lease_s: float,
        is_open: Callable[[datetime], ColumnElement[bool]] | None = None,
    ) -> None:
        """`is_open` says of which unfinished rows somebody has to work on; None: of all."""
        self._database = database
        self._table = table
        self._is_open = is_open or (lambda _: is_unfinished)
        self._lease = timedelta(seconds=lease_s)
        some = select(table.id).where(is_unfinished).limit(1)

        async def has_unfinished(session: AsyncSession) -> bool:
            return await session.scalar(some) is not None

        self._has_unfinished = PolledRead(database, has_unfinished)

    @in_transaction
    async def claim(self, session: AsyncSession, holder: str, now: datetime, most: int) -> Sequence[str]:
        """Leases up to `most` rows that nobody holds; returns their ids.

        First come those of the tenants with the fewest leases, and then those that have waited longest, since they were
        made or given back.
        """
        if most <= 0 or not await self.is_any_free(now):  # mostly
            return ()
        table, free = self._table, self._free(now)
        held = aliased(table)
        is_held = (held.tenant == table.tenant, held.holder.is_not(None), held.leased_until > now)
        num_held = select(func.count()).select_from(held).where(*is_held).scalar_subquery()
        since = func.coalesce(table.leased_until, table.created_at)
        place = func.row_number().over(partition_by=table.tenant, order_by=(since, table.id))
        first = select(table.id).where(*free).order_by(num_held + place, since, table.id).limit(most)
        taken = select(table.id).where(table.id.in_(first), *free)
        taken = taken.with_for_update(skip_locked=True)  # not needed on SQLite, which has a single writer
        claimed = (
            update(table)
            .where(table.id.in_(taken), *free)
            .values(holder=holder, leased_until=now + self._lease, num_claims=table.num_claims + 1)
            .returning(table.id)
        )
        return list(await session.scalars(quietly(claimed)))

    async def renew(self, ids: Collection[str], holder: str, now: datetime) -> Sequence[str]:
        """Renews leases; returns the ids of those that still are held and open."""
        table = self._table
        mine = (table.id.in_(list(ids)), table.holder == holder, self._is_open(now))
        renewed = update(table).where(*mine).values(leased_until=now + self._lease).returning(table.id)

        async def work(session: AsyncSession) -> list[str]:
            return list(await session.scalars(quietly(renewed)))

        return await self._database.run(work) if ids else ()

    @in_transaction
    async def release(self, session: AsyncSession, holder: str, now: datetime, row_id: str | None = None) -> None:
        """Gives one row back, or all, so that another gateway goes on at once: no claim that counts."""
        table = self._table
        mine = update(table).where(table.holder == holder, self._is_open(now) if row_id is None else table.id == row_id)
        released = mine.values(holder=None, leased_until=now, num_claims=table.num_claims - 1)
        await session.execute(quietly(released))

    async def is_any_free(self, now: datetime) -> bool:
        """Whether there is anything to claim. Locks no writer out."""
        if not await self._has_unfinished.result():
            return False  # leases end with time, but there are none

        async def work(session: AsyncSession) -> bool:
            return await session.scalar(select(self._table.id).where(*self._free(now)).limit(1)) is not None

        return await self._database.run(work)

    def _free(self, now: datetime) -> tuple[ColumnElement[bool], ...]:
        table = self._table
        return (self._is_open(now), or_(table.leased_until.is_(None), table.leased_until <= now))
