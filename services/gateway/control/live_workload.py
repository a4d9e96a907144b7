"""The last hour's requests as a workload that can be simulated: GET /halfmoon/v1/workload."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.traffic import Arrival
from services.gateway.http.received_request import query_number

_MOST_MINUTES = 24 * 60
_MOST_ROWS = 20_000


class WorkloadEndpoint:
    """Serves what was asked lately. Owns nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def workload(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/workload?minutes=60&limit=5000: rows as `halfmoon simulate` reads them.

        Of all gateways that share the ledger. Raises InvalidRequest or Unavailable.
        """
        minutes = query_number(request, "minutes", 60, _MOST_MINUTES)
        limit = query_number(request, "limit", 5_000, _MOST_ROWS)
        since = datetime.now(UTC) - timedelta(minutes=minutes)
        return web.json_response(workload_of(await self._ledger.traffic.since(since, limit)))


def workload_of(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Requests, the first at second 0; none where nobody was answered.

    How much one that was refused would have got is not known: as much as who was served before it, or first. Nor is
    how long a prompt was that nobody read: as long as the one before it.
    """
    output = next((one.output_tokens for one in arrivals if one.output_tokens), 0)
    prompt = next((one.prompt_tokens for one in arrivals if one.prompt_tokens), 0)
    rows = []
    for one in arrivals if output else ():
        output, prompt = one.output_tokens or output, one.prompt_tokens or prompt
        start_s = (one.arrived_at - arrivals[0].arrived_at).total_seconds()
        rows.append({"start_time": start_s, "prompt_len": prompt, "output_len": output})
    lasted_s = rows[-1]["start_time"] if rows else 0.0
    return {"requests": rows, "rate_per_s": (len(rows) - 1) / lasted_s if lasted_s else None}
