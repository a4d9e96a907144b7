"""Plans as the ledger keeps them, each as it was made."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import NotFound
from halfmoon.ledger.database import Database
from halfmoon.ledger.models import PlanRow


class NewPlan(NamedTuple):
    """A layout that was found for a goal, which this room does not read."""

    model: str
    goal: dict[str, Any]
    layout: dict[str, Any]
    figures: dict[str, Any]


class StoredPlan(NamedTuple):
    """A plan, by its number, and when it was kept."""

    id: int
    created_at: datetime
    plan: NewPlan


class Plans:
    """Reads and writes the table of plans. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, plan: NewPlan) -> StoredPlan:
        """Keeps a plan that was made now."""

        async def work(session: AsyncSession) -> StoredPlan:
            row = PlanRow(created_at=datetime.now(UTC), **plan._asdict())
            session.add(row)
            await session.flush()
            return _stored(row)

        return await self._database.run(work)

    async def newest(self, limit: int) -> Sequence[StoredPlan]:
        """Newest first."""

        async def work(session: AsyncSession) -> list[StoredPlan]:
            rows = await session.scalars(select(PlanRow).order_by(PlanRow.id.desc()).limit(limit))
            return [_stored(row) for row in rows]

        return await self._database.run(work)

    async def of_id(self, plan_id: int) -> StoredPlan:
        """Raises NotFound for a number that no plan has."""

        async def work(session: AsyncSession) -> StoredPlan | None:
            row = await session.get(PlanRow, plan_id)
            return None if row is None else _stored(row)

        found = await self._database.run(work)
        if found is None:
            raise NotFound(f"the ledger has no plan {plan_id}")
        return found


def _stored(row: PlanRow) -> StoredPlan:
    return StoredPlan(row.id, row.created_at, NewPlan(row.model, row.goal, row.layout, row.figures))
