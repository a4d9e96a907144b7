"""Output lengths of earlier requests, for predicting those of the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import RequestRow


class OutputSample(NamedTuple):
    """One request that ended by itself with a single output."""

    row_id: int
    qos_class: str
    prompt_tokens: int
    output_tokens: int


class SamplesUpTo(NamedTuple):
    """Samples up to a row, from which to continue."""

    row_id: int
    samples: Sequence[OutputSample]


class OutputSamples:
    """Reads output samples from the requests. Owns nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def after(self, session: AsyncSession, row_id: int, limit: int, but_of: str = "") -> SamplesUpTo:
        """The newest `limit` samples after a row, oldest first, without those written by gateway `but_of`.

        A row of another gateway that becomes visible after a later one may be missed. Raises Unavailable when the
        database does not answer.
        """
        columns = (RequestRow.id, RequestRow.qos_class, RequestRow.prompt_tokens, RequestRow.output_tokens)
        last = select(func.max(RequestRow.id))
        newest = (
            select(*columns)
            .where(RequestRow.id > row_id, RequestRow.status == "ok", RequestRow.output_tokens > 0)
            .where(RequestRow.qos_class.is_not(None), func.coalesce(RequestRow.num_outputs, 1) == 1)
            .where(or_(RequestRow.gateway_id.is_(None), RequestRow.gateway_id != but_of))
            .order_by(RequestRow.id.desc())
            .limit(limit)
        )
        last_id = await session.scalar(last) or row_id
        rows = await session.execute(newest.where(RequestRow.id <= last_id))
        samples = [OutputSample(at, name or "", prompt, output) for at, name, prompt, output in rows]
        return SamplesUpTo(last_id, samples[::-1])
