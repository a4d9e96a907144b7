"""All metrics of the planner: those of its RPCs, and the autopilot's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from halfmoon.policy.scaling.autopilot import Decision
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics

_MODES = ("off", "observe", "act")


class AutopilotMetrics:
    """Declares what the autopilot sees and does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "halfmoon_autopilot_decisions_total",
            "Decisions that were written to the ledger.",
            ["mode", "action"],
            registry=registry,
        )
        self._mode = Gauge("halfmoon_autopilot_mode", "1 for the mode in force.", ["mode"], registry=registry)
        self._pressure = Gauge(
            "halfmoon_autopilot_pressure",
            "Demand over what the present roles serve within the targets.",
            ["phase"],
            registry=registry,
        )
        self._workers = Gauge("halfmoon_autopilot_workers", "Workers by role.", ["role"], registry=registry)
        self._target = Gauge("halfmoon_autopilot_target", "Workers by role, as wanted.", ["role"], registry=registry)
        self._needed = Gauge(
            "halfmoon_autopilot_workers_needed",
            "Workers that would meet the targets, where the present ones cannot; otherwise 0.",
            registry=registry,
        )
        self._attainment = Gauge(
            "halfmoon_autopilot_attainment_ratio", "Requests that met their targets, lately.", registry=registry
        )

    def observe(self, decision: Decision, mode: str, attainment: float | None) -> None:
        """Takes the decision of this moment."""
        for name in _MODES:
            self._mode.labels(name).set(name == mode)
        for phase, pressure in decision.pressure._asdict().items():
            self._pressure.labels(phase).set(pressure)
        for role in ROLES:
            self._workers.labels(role).set(decision.split.of(role))
            self._target.labels(role).set(decision.target.of(role))
        self._needed.set(decision.num_needed if decision.action == "cannot_be_met" else 0)
        if attainment is not None:
            self._attainment.set(attainment)


class PlannerMetrics:
    """Owns the service's registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.autopilot = AutopilotMetrics(self.registry)
