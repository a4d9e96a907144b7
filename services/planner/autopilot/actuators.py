"""What the autopilot's decisions do: roles and drains over the control API, new workers through `halfmoon up`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, NoCapacity
from halfmoon.policy.scaling.autopilot import Decision
from halfmoon.policy.view.worker_view import Role
from services.planner.autopilot.gateways import Gateways
from services.planner.fleet import Fleet

log = logging.getLogger(__name__)


class Actuators:
    """Owns the start of a worker that is under way: it may take minutes, and roles change meanwhile.

    The fleet starts workers where the others run, on this host or on those of a Ray cluster.
    """

    def __init__(self, gateways: Gateways, fleet: Fleet) -> None:
        self._gateways = gateways
        self._fleet = fleet
        self._start: asyncio.Task[None] | None = None

    async def carry_out(self, decision: Decision) -> str:
        """Does it, and returns what there is to say of it. Raises HalfmoonError; nothing was done then."""
        assert decision.role is not None
        if decision.action == "add_worker":
            self._add(decision.role)
            return "started"
        if decision.action == "remove_worker":
            await self._gateways.drain(decision.worker_id)
            return "drained"
        await self._gateways.change_role(decision.worker_id, decision.role, decision.epoch)
        return "done"

    async def close(self) -> None:
        """Leaves a start that is under way to the fleet."""
        if self._start is not None:
            await cancelled(self._start)

    def _add(self, role: Role) -> None:
        if self._start is not None and not self._start.done():
            raise NoCapacity("another worker is being started")
        self._start = asyncio.create_task(self._added(role))

    async def _added(self, role: Role) -> None:
        try:
            await self._fleet.add(role)
        except HalfmoonError as error:
            log.error("autopilot.not_started", extra={"role": role, "reason": error.message})


@asynccontextmanager
async def running_actuators(gateways: Gateways, fleet: Fleet) -> AsyncIterator[Actuators]:
    """Actuators that end with the block."""
    actuators = Actuators(gateways, fleet)
    try:
        yield actuators
    finally:
        await actuators.close()
