"""Operators' changes of workers, for whoever asks later who did it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import WorkerChangeRow


class WorkerChange(NamedTuple):
    """One change; a drain is one to no role."""

    changed_at: datetime
    worker_id: str
    before: str  # the role
    after: str  # the role, or "drained" or "restarted"
    epoch: int  # of the role, after the change
    changed_by: str
    is_forced: bool
    gateway_id: str  # the gateway that was asked


class WorkerChanges:
    """Reads and writes the table of changes. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def add(self, session: AsyncSession, change: WorkerChange) -> None:
        """Adds a change."""
        await session.execute(insert(WorkerChangeRow).values(change._asdict()))

    @in_transaction
    async def newest(self, session: AsyncSession, limit: int) -> Sequence[WorkerChange]:
        """The newest changes, newest first."""
        rows = select(WorkerChangeRow).order_by(WorkerChangeRow.id.desc()).limit(limit)
        found = await session.scalars(rows)
        return [WorkerChange(*(getattr(row, name) for name in WorkerChange._fields)) for row in found]
