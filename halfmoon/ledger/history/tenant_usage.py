"""What tenants have used, summed over the requests of all gateways."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.models import RequestRow

_TOO_MANY = 429


class Usage(NamedTuple):
    """Sums over one tenant's requests."""

    num_requests: int
    num_refused: int  # over a rate, for a target, or for want of room
    prompt_tokens: int  # of requests that were not rejected
    cached_tokens: int
    output_tokens: int


class TenantUsage:
    """Reads sums from the requests. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def since(self, session: AsyncSession, moment: datetime) -> Mapping[str, Usage]:
        """The sums of each tenant over the requests since a moment."""
        served = case((RequestRow.status == "rejected", 0), else_=1)
        sums = (
            select(
                RequestRow.tenant,
                func.count(),
                func.sum(case((RequestRow.http_status == _TOO_MANY, 1), else_=0)),
                *(func.sum(tokens * served) for tokens in _TOKENS),
            )
            .where(RequestRow.created_at >= moment, RequestRow.tenant.is_not(None))
            .group_by(RequestRow.tenant)
        )
        return {str(name): Usage(*map(int, rest)) for name, *rest in await session.execute(sums)}


_TOKENS = RequestRow.prompt_tokens, RequestRow.cached_tokens, RequestRow.output_tokens
