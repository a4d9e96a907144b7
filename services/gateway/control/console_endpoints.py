"""The control API behind the console's pages: series, placements, one request, caches, stores, class edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from halfmoon.errors import NotFound
from halfmoon.ledger.history.outcomes import Outcome
from halfmoon.ledger.ledger import Ledger
from halfmoon.policy.values import AdmissionTargets
from services.gateway.cluster.cluster import Cluster
from services.gateway.control.active_classes import ActiveClasses, ClassBody
from services.gateway.control.store_view import StoreView
from services.gateway.control.target_preview import PastRequest, preview_targets
from services.gateway.http.received_request import query_number, receive_body
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.telemetry.recent_telemetry import RecentTelemetry
from services.gateway.telemetry.timeline import timeline

_MAX_PLACEMENTS = 512
_MAX_EDITS = 1_000
_MAX_MINUTES = 30
_MAX_PREFIXES = 100
_PREVIEW_WINDOW = timedelta(hours=1)
_PREVIEW_ROWS = 50_000
_MAX_VALUES = 2_000  # of a class's body


class ConsoleEndpoints:
    """Serves what the console shows. Owns nothing."""

    def __init__(
        self,
        cluster: Cluster,
        ledger: Ledger,
        classes: ActiveClasses,
        telemetry: RecentTelemetry,
        stores: StoreView,
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._classes = classes
        self._telemetry = telemetry
        self._stores = stores

    async def series(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/series?minutes=10: figures over time, oldest first."""
        minutes = query_number(request, "minutes", 10, _MAX_MINUTES)
        return web.json_response(self._telemetry.series.shown(self._cluster.clock(), 60.0 * minutes))

    async def placements(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/placements?limit=50: the newest decisions, newest first."""
        limit = query_number(request, "limit", 50, _MAX_PLACEMENTS)
        return web.json_response(self._telemetry.decisions.newest(limit, self._cluster.clock()))

    async def request(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/requests/{request_id}: row, decision and timeline. Raises NotFound or Unavailable."""
        request_id = request.match_info["request_id"]
        decisions, now_s = self._telemetry.decisions, self._cluster.clock()
        decided_id = next((name for name in (request_id, f"{request_id}-0") if decisions.of(name, now_s)), request_id)
        decision = decisions.of(decided_id, now_s)
        outcome = await self._ledger.outcomes.of(request_id)
        if outcome is None and decision is None:
            raise NotFound(f"there is no request {request_id!r} in the ledger")
        row = outcome and {**outcome.as_dict(), "created_at": outcome.created_at.isoformat()}
        waited_s = decision["waited_s"] if decision else 0.0
        spans = [span._asdict() for span in timeline(row, waited_s, decisions.phases(decided_id))] if row else []
        return web.json_response({"request": row, "decision": decision, "timeline": spans})

    async def cache(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/cache?limit=20: the workers' prefix caches, and the hottest prefixes."""
        limit = query_number(request, "limit", 20, _MAX_PREFIXES)
        membership = self._cluster.membership
        workers = [
            {
                "worker_id": member.worker_id,
                "role": member.role,
                "cached_blocks": membership.index.num_blocks(member.holder),
                "total_blocks": member.identity.total_blocks,
                "block_tokens": member.identity.layout.block_tokens,
            }
            for member in membership.members()
        ]
        now_s = self._cluster.clock()
        prefixes = [
            {
                "key": prefix.key.to_bytes(8, "little").hex(),
                "tokens": prefix.num_tokens,
                "uses": round(prefix.num_uses, 1),
                "replicas": prefix.num_holders,
                "age_s": now_s - prefix.last_s,
            }
            for prefix in self._telemetry.prefixes.hottest(limit, now_s)
        ]
        block_bytes = next((layout.block_bytes for layout in membership.kv_layouts), None)  # on a worker
        return web.json_response(
            {
                "workers": workers,
                "block_bytes": block_bytes,
                "prefixes": prefixes,
                "decisions": self._decisions(),
            }
        )

    def _decisions(self) -> list[dict[str, Any]]:
        """What this gateway, and the workers that are here, have decided about the pool, and how often."""
        counts = Counter(self._telemetry.pool_decisions)
        counts.update({("prefill_device", one): count for one, count in self._telemetry.prefill_devices.items()})
        for member in self._cluster.membership.members():
            for one in member.load.decisions:
                counts[one.decision, one.reason] += one.count
        return [
            {"decision": decision, "reason": reason, "count": count} for (decision, reason), count in counts.items()
        ]

    async def stores(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/stores: the figures of the stores that workers use, and of the gateway's own."""
        return web.json_response(await self._stores.shown())

    async def class_edits(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/class_edits?limit=50: edits of classes, newest first. Raises Unavailable."""
        edits = await self._ledger.classes.edits(query_number(request, "limit", 50, _MAX_EDITS))
        return web.json_response([{**edit._asdict(), "edited_at": edit.edited_at.isoformat()} for edit in edits])

    async def class_preview(self, request: web.Request) -> web.Response:
        """POST /halfmoon/v1/class_previews/{name}: what this class would have done in the last hour.

        Changes nothing. Raises InvalidRequest if the class could not be saved, or Unavailable.
        """
        name = request.match_info["name"]
        body = parse_body(ClassBody, await receive_body(request), _MAX_VALUES)
        present = await self._classes.check(name, body)
        since = datetime.now(UTC) - _PREVIEW_WINDOW
        past = _past(await self._ledger.outcomes.since(since, name, _PREVIEW_ROWS))
        edited = AdmissionTargets(body.ttft_s, body.tbt_s)
        return web.json_response(preview_targets(past, present, edited)._asdict())


def _past(outcomes: Sequence[Outcome]) -> list[PastRequest]:
    return [
        PastRequest(
            outcome.status == "rejected",
            outcome.predicted_ttft_s,
            outcome.predicted_tbt_s,
            outcome.ttft_s,
            outcome.mean_tbt_s,
            is_lower_bound=bool(outcome.refused_unread),
        )
        for outcome in outcomes
        if outcome.predicted_ttft_s is not None
    ]
