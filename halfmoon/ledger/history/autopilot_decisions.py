"""The autopilot's decisions, with what was predicted of them and what was measured later."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import AutopilotDecisionRow


class StoredDecision(NamedTuple):
    """One decision; see `AutopilotDecisionRow`."""

    decided_at: datetime
    mode: str
    action: str
    reason: str
    worker_id: str
    before: str
    after: str
    split: str
    target: str
    num_needed: int
    prefill: float
    decode: float
    predicted_prefill: float
    predicted_decode: float
    attainment: float | None
    outcome: str
    measured_at: datetime | None = None
    measured_prefill: float | None = None
    measured_decode: float | None = None
    measured_attainment: float | None = None


class AutopilotDecisions:
    """Reads and writes the table of decisions. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def add(self, session: AsyncSession, decision: StoredDecision) -> int:
        """Adds a decision and returns its number."""
        adding = insert(AutopilotDecisionRow).values(decision._asdict()).returning(AutopilotDecisionRow.id)
        return int((await session.execute(adding)).scalar_one())

    @in_transaction
    async def measured(
        self, session: AsyncSession, number: int, at: datetime, prefill: float, decode: float, attainment: float | None
    ) -> None:
        """Adds what was measured a while after a decision."""
        values = {
            "measured_at": at,
            "measured_prefill": prefill,
            "measured_decode": decode,
            "measured_attainment": attainment,
        }
        changing = update(AutopilotDecisionRow).where(AutopilotDecisionRow.id == number).values(values)
        await session.execute(changing)

    @in_transaction
    async def newest(self, session: AsyncSession, limit: int) -> Sequence[StoredDecision]:
        """The newest decisions, newest first."""
        rows = select(AutopilotDecisionRow).order_by(AutopilotDecisionRow.id.desc()).limit(limit)
        found = await session.scalars(rows)
        return [StoredDecision(*(getattr(row, name) for name in StoredDecision._fields)) for row in found]
