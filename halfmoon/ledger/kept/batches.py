"""Batches of requests: what was asked for, how far it is, and the results of lines until they are files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import NotFound
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.connection.transaction import quietly
from halfmoon.ledger.history.retention import forever
from halfmoon.ledger.kept.leases import Leases
from halfmoon.ledger.kept.pages import Page, read_page
from halfmoon.ledger.models import BatchResultRow, BatchRow, FileRow

BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]

UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_ENDING: tuple[BatchStatus, ...] = ("finalizing", "cancelling")
_CANCELLABLE: tuple[BatchStatus, ...] = ("validating", "in_progress")
_LEASE_S = 20.0


class Batch(NamedTuple):
    """One batch."""

    id: str
    tenant: str
    status: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: datetime
    expires_at: datetime
    labels: Mapping[str, Any]
    times: Mapping[str, Any]
    errors: Sequence[Any]
    num_total: int
    num_completed: int
    num_failed: int
    num_claims: int = 0


class LineResult(NamedTuple):
    """What became of one line, as a line of the output or the error file."""

    number: int  # from 0
    is_error: bool
    line: bytes


class Batches:
    """Reads and writes batches. Owns nothing. Everything here raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database
        is_unfinished = BatchRow.status.in_(UNFINISHED)
        self.leases = Leases(database, BatchRow, is_unfinished, _LEASE_S)
        self.leases_to_end = Leases(database, BatchRow, is_unfinished, _LEASE_S, _has_to_end)  # who runs no lines

    @in_transaction
    async def create(self, session: AsyncSession, new: Batch, now: datetime) -> None:
        """Adds a batch of a file of the same tenant. Raises NotFound if that is not there."""
        of_batch = (FileRow.id == new.input_file_id, FileRow.tenant == new.tenant, FileRow.is_whole)
        held = update(FileRow).where(*of_batch, FileRow.expires_at > now, FileRow.purpose == "batch")
        held = held.values(num_bytes=FileRow.num_bytes)  # first: nobody deletes the file meanwhile
        if not (await session.execute(quietly(held.returning(FileRow.id)))).all():
            message = f"No such File object with purpose batch: {new.input_file_id[:80]}"
            raise NotFound(message, param="input_file_id")
        await session.execute(insert(BatchRow).values(new._asdict()))

    @in_transaction
    async def get(self, session: AsyncSession, batch_id: str, tenant: str) -> Batch:
        """A tenant's batch. Raises NotFound."""
        row = await session.scalar(select(BatchRow).where(BatchRow.id == batch_id, BatchRow.tenant == tenant))
        if row is None:
            raise _absent(batch_id)
        return _batch(row)

    @in_transaction
    async def page(self, session: AsyncSession, tenant: str, page: Page) -> Sequence[Batch]:
        """A tenant's batches: what `read_page` returns."""
        return [_batch(row) for row in await read_page(session, BatchRow, [BatchRow.tenant == tenant], page)]

    @in_transaction
    async def num_unfinished(self, session: AsyncSession, tenant: str) -> int:
        """How many batches of a tenant wait or run."""
        mine = (BatchRow.tenant == tenant, BatchRow.status.in_(UNFINISHED))
        return await session.scalar(select(func.count()).select_from(BatchRow).where(*mine)) or 0

    @in_transaction
    async def claimed(self, session: AsyncSession, batch_id: str, holder: str) -> Batch | None:
        """A batch that this gateway works on; None if it does not any more."""
        mine = (BatchRow.id == batch_id, BatchRow.holder == holder, BatchRow.status.in_(UNFINISHED))
        row = await session.scalar(select(BatchRow).where(*mine))
        return None if row is None else _batch(row)

    @in_transaction
    async def cancel(self, session: AsyncSession, batch_id: str, tenant: str, now: datetime) -> Batch:
        """Asks for the end of a batch; one that is ending or has ended stays as it is. Raises NotFound."""
        mine = (BatchRow.id == batch_id, BatchRow.tenant == tenant)
        asked = update(BatchRow).where(*mine, BatchRow.status.in_(_CANCELLABLE)).values(status="cancelling")
        await session.execute(quietly(asked))  # first: its gateway changes nothing from here on
        row = await session.scalar(select(BatchRow).where(*mine))
        if row is None:
            raise _absent(batch_id)
        if row.status == "cancelling":
            row.times = {"cancelling_at": int(now.timestamp()), **row.times}
        return _batch(row)

    @in_transaction
    async def change(
        self, session: AsyncSession, /, batch: Batch, holder: str, before: Sequence[BatchStatus], **values: Any
    ) -> bool:
        """Changes a batch that `holder` has, while its status is one of `before`. False if it is not."""
        mine = (BatchRow.id == batch.id, BatchRow.holder == holder, BatchRow.status.in_(before))
        changed = update(BatchRow).where(*mine).values(**values).returning(BatchRow.id)
        if not (await session.execute(quietly(changed))).all():
            return False
        whole = [values[name] for name in ("output_file_id", "error_file_id") if values.get(name)]
        if whole:
            await session.execute(quietly(update(FileRow).where(FileRow.id.in_(whole)).values(is_whole=True)))
        return True

    async def add_results(self, batch_id: str, holder: str, results: Sequence[LineResult]) -> bool:
        """Adds results of lines that have none. False, and nothing is added, if `holder` does not have the batch."""
        num_failed = sum(result.is_error for result in results)
        mine = update(BatchRow).where(BatchRow.id == batch_id, BatchRow.holder == holder)
        counted = mine.values(
            num_completed=BatchRow.num_completed + len(results) - num_failed,
            num_failed=BatchRow.num_failed + num_failed,
        )

        async def work(session: AsyncSession) -> bool:
            if not (await session.execute(quietly(counted.returning(BatchRow.id)))).all():
                return False
            await session.execute(insert(BatchResultRow), [{"batch_id": batch_id, **one._asdict()} for one in results])
            return True

        return await self._database.run(work, deadline_s=None)  # a cancelled commit may or may not have been applied

    @in_transaction
    async def done(self, session: AsyncSession, batch_id: str) -> set[int]:
        """The numbers of lines that have a result."""
        rows = select(BatchResultRow.number).where(BatchResultRow.batch_id == batch_id)
        return set(await session.scalars(rows))

    @in_transaction
    async def results(
        self, session: AsyncSession, batch_id: str, *, is_error: bool, after: int, most: int = 50
    ) -> Sequence[LineResult]:
        """The next results of one kind, in the order of their lines."""
        row = BatchResultRow
        wanted = select(row).where(row.batch_id == batch_id, row.is_error == is_error, row.number > after)
        rows = await session.scalars(wanted.order_by(row.number).limit(most))
        return [LineResult(one.number, one.is_error, one.line) for one in rows]

    @in_transaction
    async def forget_results(self, session: AsyncSession, batch_id: str) -> None:
        """Removes the results of a batch, which are files by now. Those that are left `keep` finds."""
        await session.execute(quietly(delete(BatchResultRow).where(BatchResultRow.batch_id == batch_id)))

    async def keep(self, days: float) -> None:
        """Runs forever, removing finished batches that are older than `days`, and results that are files by now."""

        async def forget() -> int:
            old = BatchRow.created_at < datetime.now(UTC) - timedelta(days=days)
            gone = delete(BatchRow).where(old, BatchRow.status.not_in(UNFINISHED)).returning(BatchRow.id)
            unfinished = select(BatchRow.id).where(BatchRow.status.in_(UNFINISHED))
            left = delete(BatchResultRow).where(BatchResultRow.batch_id.not_in(unfinished))

            async def work(session: AsyncSession) -> int:
                ids = (await session.execute(quietly(gone))).scalars().all()
                await session.execute(quietly(left))
                return len(ids)

            return await self._database.run(work)

        await forever(forget, "batches")


def _has_to_end(now: datetime) -> ColumnElement[bool]:
    is_late = and_(BatchRow.status.in_(UNFINISHED), BatchRow.expires_at <= now)
    return or_(BatchRow.status.in_(_ENDING), is_late)


def _absent(batch_id: str) -> NotFound:
    return NotFound(f"No batch found with id '{batch_id[:80]}'.", param="batch_id")


def _batch(row: BatchRow) -> Batch:
    return Batch(*(getattr(row, name) for name in Batch._fields))
