"""Plans as the ledger keeps them, each as it was made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.database import Database
from halfmoon.ledger.models import PlanRow


class StoredPlan(NamedTuple):
    """A layout that was found for a goal, which this room does not read."""

    model: str
    goal: dict[str, Any]
    layout: dict[str, Any]
    figures: dict[str, Any]


class Plans:
    """Reads and writes the table of plans. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, plan: StoredPlan) -> None:
        """Keeps a plan that was made now."""

        async def work(session: AsyncSession) -> None:
            session.add(PlanRow(created_at=datetime.now(UTC), **plan._asdict()))

        await self._database.run(work)

    async def newest(self, model: str) -> StoredPlan | None:
        """Of a model; None where there is none."""
        of_model = select(PlanRow).where(PlanRow.model == model).order_by(PlanRow.id.desc()).limit(1)

        async def work(session: AsyncSession) -> StoredPlan | None:
            row = (await session.scalars(of_model)).first()
            return None if row is None else StoredPlan(row.model, row.goal, row.layout, row.figures)

        return await self._database.run(work)
