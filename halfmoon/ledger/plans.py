"""Plans as stored in the ledger, unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import NotFound
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import PlanRow


class NewPlan(NamedTuple):
    """A layout found for a goal; both are opaque here."""

    model: str
    goal: dict[str, Any]
    layout: dict[str, Any]
    figures: dict[str, Any]


class StoredPlan(NamedTuple):
    """A plan, its number, and when it was stored."""

    id: int
    created_at: datetime
    plan: NewPlan


class Plans:
    """Reads and writes the table of plans. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def add(self, session: AsyncSession, plan: NewPlan) -> StoredPlan:
        """Stores a new plan."""
        row = PlanRow(created_at=datetime.now(UTC), **plan._asdict())
        session.add(row)
        await session.flush()
        return _stored(row)

    @in_transaction
    async def newest(self, session: AsyncSession, limit: int) -> Sequence[StoredPlan]:
        """The newest plans, newest first."""
        rows = await session.scalars(select(PlanRow).order_by(PlanRow.id.desc()).limit(limit))
        return [_stored(row) for row in rows]

    async def of_id(self, plan_id: int) -> StoredPlan:
        """The plan with a number. Raises NotFound if there is none."""

        async def work(session: AsyncSession) -> StoredPlan | None:
            row = await session.get(PlanRow, plan_id)
            return None if row is None else _stored(row)

        plan = await self._database.run(work)
        if plan is None:
            raise NotFound(f"the ledger has no plan {plan_id}")
        return plan


def _stored(row: PlanRow) -> StoredPlan:
    return StoredPlan(row.id, row.created_at, NewPlan(row.model, row.goal, row.layout, row.figures))
