"""Latency profiles as stored in the ledger: the newest one of each kind of worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import ProfileRow


class StoredProfile(NamedTuple):
    """Speed that a worker of one kind measured of itself; coefficients as in `policy.models.latency`."""

    kind: str
    measured_at: datetime
    prefill: tuple[float, ...]
    step: tuple[float, ...]


class Profiles:
    """Reads and writes the table of profiles. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def all(self, session: AsyncSession) -> Sequence[StoredProfile]:
        """All profiles, one per kind."""
        rows = await session.scalars(select(ProfileRow).order_by(ProfileRow.kind))
        return [StoredProfile(row.kind, row.measured_at, tuple(row.prefill), tuple(row.step)) for row in rows]

    async def put(self, profile: StoredProfile) -> None:
        """Stores a profile in place of its kind's; no effect if another writer is storing one for that kind."""

        async def work(session: AsyncSession) -> None:
            await session.execute(delete(ProfileRow).where(ProfileRow.kind == profile.kind))
            session.add(
                ProfileRow(
                    kind=profile.kind,
                    measured_at=profile.measured_at,
                    prefill=list(profile.prefill),
                    step=list(profile.step),
                )
            )

        with suppress(IntegrityError):
            await self._database.run(work)
