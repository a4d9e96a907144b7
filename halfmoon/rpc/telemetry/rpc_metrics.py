"""RPC metrics that every service has, recorded by the server interceptor alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RpcMetrics:
    """Owns the RPC metrics of one service in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handled = Counter(
            "halfmoon_rpc_handled", "RPCs ended, by method and status", ["method", "status"], registry=registry
        )
        self.seconds = Histogram(
            "halfmoon_rpc_seconds", "Time from call to end", ["method"], buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge("halfmoon_rpc_in_flight", "RPCs running", ["method"], registry=registry)
        self.refused = Counter(
            "halfmoon_rpc_refused", "RPCs refused for want of a credential, by status", ["status"], registry=registry
        )
        self.certificate_expires = Gauge(
            "halfmoon_rpc_certificate_expires_seconds",
            "Unix time at which the service's certificate expires; 0 without mutual TLS",
            registry=registry,
        )
