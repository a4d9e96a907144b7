"""The autopilot's loop: look, decide, act if told, write it down."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from halfmoon.background import logged, running
from halfmoon.config.planner import AutopilotMode
from halfmoon.errors import HalfmoonError
from halfmoon.policy.scaling.autopilot import Autopilot, Decision
from halfmoon.policy.scaling.observation import Observation
from halfmoon.policy.view.worker_view import Role
from services.planner.autopilot.actuators import Actuators
from services.planner.autopilot.decision_log import DecisionLog, attainment_of
from services.planner.autopilot.gateways import Gateways
from services.planner.autopilot.slow_loop import SlowLoop
from services.planner.metrics import AutopilotMetrics

log = logging.getLogger(__name__)

_EVERY_S = 1.0  # workers report as often


class LiveAutopilot:
    """Owns the policy's state, and the status that gateways and console show.

    A look that fails changes nothing: the next one follows a second later.
    """

    def __init__(
        self,
        policy: Autopilot,
        own_mode: AutopilotMode,
        gateways: Gateways,
        actuators: Actuators,
        decisions: DecisionLog,
        slow_loop: SlowLoop,
        metrics: AutopilotMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._own_mode = own_mode
        self._gateways = gateways
        self._actuators = actuators
        self._decisions = decisions
        self._slow_loop = slow_loop
        self._metrics = metrics
        self._clock = clock
        self._has_looked = False
        self._is_failing = False
        self._seen: Observation | None = None
        self.status: dict[str, Any] = {"own_mode": own_mode}

    async def run(self) -> None:
        """Looks and decides, forever."""
        async with running(logged(self._slow_loop.run(lambda: self._seen))):
            while True:
                try:
                    await self.once()
                    self._has_looked, self._is_failing = True, False
                except HalfmoonError as error:
                    self._note_failure(error.message)
                except Exception:  # no answer of a gateway may end this loop
                    self._note_failure("internal error", is_bug=True)
                await asyncio.sleep(_EVERY_S)

    async def once(self) -> Decision:
        """One look and what follows from it. Raises Unavailable if no gateway answers."""
        look = await self._gateways.look(self.status)
        mode, now_s = look.mode or self._own_mode, self._clock()
        self._seen = None if mode == "off" else look.seen
        decision = self._policy.decide(look.seen, now_s, self._slow_loop.advice)
        traffic = look.seen.traffic
        self._metrics.observe(decision, mode, attainment_of(traffic))
        await self._decisions.measure(decision, traffic, now_s)
        outcome = await self._carried_out(decision, mode)
        if mode != "off" and self._decisions.is_news(decision, mode, now_s):
            self._metrics.decisions.labels(mode, decision.action).inc()
            before = _role_of(look.seen, decision.worker_id)
            await self._decisions.add(decision, mode, outcome, before or "", traffic, now_s)
        self.status = self._status(decision, mode, look.seen, outcome)
        return decision

    async def _carried_out(self, decision: Decision, mode: str) -> str:
        """Acts if told, and says in a word what came of it."""
        if not decision.changes:
            return ""
        if mode != "act":
            self._policy.undo()
            return "advised"
        try:
            return await self._actuators.carry_out(decision)
        except HalfmoonError as error:
            self._policy.undo()
            return f"refused: {error.message}"

    def _status(self, decision: Decision, mode: str, seen: Observation, outcome: str) -> dict[str, Any]:
        traffic = seen.traffic
        status = {
            "own_mode": self._own_mode,
            "mode": mode,
            "action": decision.action,
            "reason": decision.reason,
            "outcome": outcome,
            "worker_id": decision.worker_id,
            "role": decision.role,
            "split": list(decision.split),
            "target": list(decision.target),
            "num_needed": decision.num_needed,
            "pressure": decision.pressure._asdict(),
            "predicted": decision.predicted._asdict(),
            "attainment": attainment_of(traffic),
            "outlook": self._slow_loop.shown,
            "rate_per_s": traffic.num_requests / traffic.seconds if traffic.seconds else 0.0,
        }
        return {name: _shown(value) for name, value in status.items()}

    def _note_failure(self, reason: str, *, is_bug: bool = False) -> None:
        """Logs the first failure of an outage; before the first look the gateways may only be starting."""
        if not self._is_failing:
            level = logging.ERROR if self._has_looked or is_bug else logging.WARNING
            log.log(level, "autopilot.blind", extra={"reason": reason}, exc_info=is_bug)
        self._is_failing = True


def _role_of(seen: Observation, worker_id: str) -> Role | None:
    return next((worker.role for worker in seen.workers if worker.worker_id == worker_id), None)


def _shown(value: Any) -> Any:
    """JSON has neither infinity nor NaN: they become null."""
    if isinstance(value, Mapping):
        return {name: _shown(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
