"""Outcomes of earlier requests, for analysis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import RequestRow


class Outcome(NamedTuple):
    """One request on which admission decided; times in seconds."""

    status: str  # RequestStatus
    predicted_ttft_s: float | None
    predicted_tbt_s: float | None  # None for one token
    ttft_s: float | None
    mean_tbt_s: float | None
    refused_unread: bool | None  # predictions are lower bounds; None in rows written before this column


class Outcomes:
    """Reads outcomes from the requests. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def since(self, session: AsyncSession, moment: datetime, qos_class: str, limit: int) -> Sequence[Outcome]:
        """The newest `limit` requests of a class after a moment."""
        columns = (
            RequestRow.status,
            RequestRow.predicted_ttft_s,
            RequestRow.predicted_tbt_s,
            RequestRow.ttft_s,
            RequestRow.mean_tbt_s,
            RequestRow.refused_unread,
        )
        newest = (
            select(*columns)
            .where(RequestRow.created_at >= moment, RequestRow.qos_class == qos_class)
            .where(RequestRow.predicted_ttft_s.is_not(None))
            .order_by(RequestRow.id.desc())
            .limit(limit)
        )
        return [Outcome._make(row) for row in await session.execute(newest)]

    @in_transaction
    async def of(self, session: AsyncSession, request_id: str) -> RequestRow | None:
        """The newest request with that id, once it has ended and is written."""
        newest = select(RequestRow).where(RequestRow.request_id == request_id).order_by(RequestRow.id.desc()).limit(1)
        row: RequestRow | None = await session.scalar(newest)
        return row
