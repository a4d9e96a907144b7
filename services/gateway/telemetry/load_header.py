"""The workers' load in a response's header, in the format of ORCA as vLLM writes it, for clients that ask for it."""

from __future__ import annotations

import json

from aiohttp import web

from services.gateway.cluster.membership import Membership
from services.gateway.telemetry.vllm_metrics import kv_usage, waiting_by_reason

HEADER = "endpoint-load-metrics"
ASKING_HEADER = "endpoint-load-metrics-format"  # TEXT or JSON


class LoadHeader:
    """Reads the members' latest reports. Owns nothing."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the header to the response, if the request asks for it in a known format."""
        wanted = request.headers.get(ASKING_HEADER, "").upper()
        if wanted not in ("TEXT", "JSON"):
            return
        members = self._membership.members()
        waiting = float(sum(waiting_by_reason(members).values()))
        metrics = {"kv_cache_usage_perc": kv_usage(members), "num_requests_waiting": waiting}
        texts = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        text = json.dumps({"named_metrics": metrics}) if wanted == "JSON" else texts
        response.headers[HEADER] = f"{wanted} {text}"
