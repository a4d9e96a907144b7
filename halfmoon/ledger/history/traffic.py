"""Recent traffic: when requests arrived and how long they were."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import RequestRow

_COUNTED = ("ok", "cancelled", "rejected")  # a failed request would have been repeated, or never sent


class Arrival(NamedTuple):
    """One request; `output_tokens` is the length of each of its choices, 0 without output."""

    arrived_at: datetime
    prompt_tokens: int  # 0 if it was rejected before they were counted
    output_tokens: int


class Traffic:
    """Reads arrivals from the requests. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def since(self, session: AsyncSession, moment: datetime, limit: int) -> Sequence[Arrival]:
        """The newest `limit` requests after a moment, in order of arrival."""
        columns = (
            RequestRow.created_at, RequestRow.prompt_tokens, RequestRow.output_tokens, RequestRow.num_outputs
        )  # fmt: skip
        newest = (
            select(*columns)
            .where(RequestRow.created_at >= moment, RequestRow.status.in_(_COUNTED))
            .where(or_(RequestRow.prompt_tokens > 0, RequestRow.refused_unread.is_(True)))
            .order_by(RequestRow.created_at.desc())
            .limit(limit)
        )
        rows = [
            Arrival(arrived_at, prompt, output // max(num_outputs or 1, 1))
            for arrived_at, prompt, output, num_outputs in await session.execute(newest)
        ]
        return rows[::-1]
