"""When workers tell the gateway of their load: at full intervals, those that changed."""

from __future__ import annotations

from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.routers.policy_router import PolicyRouter


class LoadReports:
    """Owns who changed since the last report, and whether the next one is under way."""

    def __init__(self, events: EventQueue, report_s: float, gateway: PolicyRouter | None) -> None:
        """Every `report_s`; None where nobody listens."""
        self._events = events
        self._report_s = report_s
        self._gateway = gateway
        self._changed: dict[int, SimWorker] = {}
        self._has_tick = False

    def note(self, worker: SimWorker) -> None:
        """Its next load report says something new."""
        if self._gateway is None:
            return
        self._changed[worker.number] = worker
        if not self._has_tick:
            self._has_tick = True
            self._events.at(_next_multiple(self._report_s, self._events.now_s), self._on_tick, self._gateway)

    def _on_tick(self, gateway: PolicyRouter) -> None:
        self._has_tick = False
        changed, self._changed = self._changed, {}
        for worker in changed.values():
            if worker.is_alive:
                gateway.report(worker, self._events.now_s)
                if worker.steps.wake_s is not None:
                    self.note(worker)


def _next_multiple(interval_s: float, now_s: float) -> float:
    """The first full interval after now; rounding makes 1.0 // 0.1 nine, and ten tenths would be now again."""
    number = now_s // interval_s + 1
    following_s = number * interval_s
    return following_s if following_s > now_s else (number + 1) * interval_s
