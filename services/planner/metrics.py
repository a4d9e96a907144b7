"""All metrics of the planner: those of its RPCs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics


class PlannerMetrics:
    """Owns the service's registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
