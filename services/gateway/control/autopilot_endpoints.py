"""The autopilot in the control API: what it observes, what it last did, and its mode.

It runs in the planner, which asks for an observation every second and says what it makes of the last one. The mode that
an operator has set is kept in the ledger; without one, the planner's own counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from aiohttp import web
from pydantic import Field

from halfmoon.errors import Unavailable
from halfmoon.ledger.ledger import Ledger
from halfmoon.policy.scaling.observed_json import observation_json
from services.gateway.cluster.cluster import Cluster
from services.gateway.http.received_request import query_number, receive_body
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.strict_model import Part
from services.gateway.telemetry.observed_cluster import ObservedTraffic

_SHOWN = 20
_MAX_VALUES = 64
_MAX_ROWS = 1_000
_MAX_WINDOW_S = 300
_MODE_S = 1.0  # that a mode read from the ledger counts


class ModeBody(Part):
    """A mode, or None for the planner's own, and the version that it replaces."""

    mode: Literal["off", "observe", "act"] | None
    version: int = Field(0, ge=0, lt=1 << 31)  # 0: none has been set


class ObservationBody(Part):
    """What the autopilot wants to see, and how it stands."""

    seconds: int = Field(8, ge=1, le=_MAX_WINDOW_S, description="of traffic")
    status: dict[str, Any] = Field(default_factory=dict)


class AutopilotEndpoints:
    """Serves them. Owns the status that the planner told last, and the mode as the ledger had it last."""

    def __init__(self, cluster: Cluster, ledger: Ledger, traffic: ObservedTraffic, num_gateways: int) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._traffic = traffic
        self._num_gateways = num_gateways
        self._status: Mapping[str, Any] | None = None
        self._status_at: datetime | None = None
        self._mode: str | None = None
        self._mode_s: float | None = None  # when it was read

    async def observe(self, request: web.Request) -> web.Response:
        """POST /halfmoon/v1/autopilot/observation: takes the autopilot's status, returns what it is to see.

        Raises InvalidRequest, and Unavailable if the mode was never read.
        """
        body = parse_body(ObservationBody, await receive_body(request), _MAX_VALUES)
        self._status, self._status_at = body.status, datetime.now(UTC)
        now_s = self._cluster.clock()
        if self._mode_s is None:
            await self._read_mode()
        elif now_s > self._mode_s + _MODE_S:
            with suppress(Unavailable):  # the mode that was read last stays in force
                await self._read_mode()
        members = self._cluster.membership.members()
        return web.json_response(
            {
                "gateway_id": self._cluster.gateway_id,
                "num_gateways": self._num_gateways,
                "mode": self._mode,
                "observation": observation_json(self._traffic.observation(members, body.seconds, now_s), now_s),
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/autopilot?limit=50: mode, status and the newest decisions. Raises Unavailable."""
        limit = query_number(request, "limit", 50, _MAX_ROWS)
        edits = await self._ledger.autopilot.newest(_SHOWN)
        decisions = await self._ledger.autopilot_decisions.newest(limit)
        present = edits[0].mode if edits else None
        return web.json_response(
            {
                "mode": present or (self._status or {}).get("own_mode"),
                "set": present,
                "version": edits[0].version if edits else 0,
                "edits": [{**edit._asdict(), "edited_at": edit.edited_at.isoformat()} for edit in edits],
                "status": self._status,
                "status_at": self._status_at and self._status_at.isoformat(),
                "decisions": [_shown(decision._asdict()) for decision in decisions],
            }
        )

    async def put(self, request: web.Request) -> web.Response:
        """PUT /halfmoon/v1/autopilot: the mode, and the version that it replaces.

        Raises InvalidRequest, VersionConflict or Unavailable; nothing has changed then.
        """
        body = parse_body(ModeBody, await receive_body(request), _MAX_VALUES)
        await self._ledger.autopilot.put(body.mode, body.version)
        await self._read_mode()
        return await self.get(request)

    async def _read_mode(self) -> None:
        edit = await self._ledger.autopilot.present()
        self._mode, self._mode_s = edit and edit.mode, self._cluster.clock()


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}
