"""Recent requests as a workload for the simulator: GET /halfmoon/v1/workload."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from halfmoon.ledger.history.traffic import Arrival
from halfmoon.ledger.ledger import Ledger
from services.gateway.http.received_request import query_number

_MAX_MINUTES = 24 * 60
_MAX_ROWS = 20_000


class WorkloadEndpoint:
    """Serves the recent workload. Owns nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def workload(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/workload?minutes=60&limit=5000: rows for `halfmoon simulate`.

        Includes all gateways that share the ledger. Raises InvalidRequest or Unavailable.
        """
        minutes = query_number(request, "minutes", 60, _MAX_MINUTES)
        limit = query_number(request, "limit", 5_000, _MAX_ROWS)
        since = datetime.now(UTC) - timedelta(minutes=minutes)
        return web.json_response(workload_of(await self._ledger.traffic.since(since, limit)))


def workload_of(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """The requests, with the first at second 0; empty if none was served.

    The output length of a refused request is unknown, and so is the prompt length of one that was rejected early. Each
    counts as long as the last known one before it, or as the first known one.
    """
    output = next((arrival.output_tokens for arrival in arrivals if arrival.output_tokens), 0)
    prompt = next((arrival.prompt_tokens for arrival in arrivals if arrival.prompt_tokens), 0)
    rows = []
    for arrival in arrivals if output else ():
        output, prompt = arrival.output_tokens or output, arrival.prompt_tokens or prompt
        start_s = (arrival.arrived_at - arrivals[0].arrived_at).total_seconds()
        rows.append({"start_time": start_s, "prompt_len": prompt, "output_len": output})
    lasted_s = rows[-1]["start_time"] if rows else 0.0
    return {"requests": rows, "rate_per_s": (len(rows) - 1) / lasted_s if lasted_s else None}
