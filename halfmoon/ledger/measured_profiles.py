"""Profiles measured by `halfmoon profile`, as stored in the ledger: one per name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import MeasuredProfileRow


class NamedProfile(NamedTuple):
    """A profile and when it was measured; its content is that of the simulator's `MeasuredProfile`."""

    name: str
    measured_at: datetime
    profile: Mapping[str, Any]


class MeasuredProfiles:
    """Reads and writes the table. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def all(self, session: AsyncSession) -> Sequence[NamedProfile]:
        """All profiles, by name."""
        rows = await session.scalars(select(MeasuredProfileRow).order_by(MeasuredProfileRow.name))
        return [NamedProfile(row.name, row.measured_at, row.profile) for row in rows]

    @in_transaction
    async def put(self, session: AsyncSession, named: NamedProfile) -> None:
        """Stores a profile in place of the one with its name."""
        await session.execute(delete(MeasuredProfileRow).where(MeasuredProfileRow.name == named.name))
        session.add(MeasuredProfileRow(name=named.name, measured_at=named.measured_at, profile=dict(named.profile)))
