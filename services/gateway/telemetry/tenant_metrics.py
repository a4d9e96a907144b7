"""Metrics by tenant, for a bounded number of tenants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from halfmoon.ledger.models import RequestRow

_MAX_TENANTS = 100
_OTHERS = "other"  # no tenant's name by chance: one of that name is counted with them


class TenantMetrics:
    """Owns the counts by tenant. The first hundred tenants have lines of their own, all later ones share one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._known: set[str] = set()
        self._requests = Counter(
            "halfmoon_gateway_tenant_requests", "Requests ended", ["tenant", "status"], registry=registry
        )
        self._tokens = Counter(
            "halfmoon_gateway_tenant_tokens", "Tokens of prompts and outputs", ["tenant", "kind"], registry=registry
        )
        self._limited = Counter(
            "halfmoon_gateway_tenant_rate_limited",
            "Requests over a tenant's rate limit",
            ["tenant", "limit"],
            registry=registry,
        )

    def count(self, row: RequestRow) -> None:
        """Counts a request that ended; without a tenant nothing."""
        if row.tenant is None:
            return
        label = self._label(row.tenant)
        self._requests.labels(label, row.status).inc()
        if row.status != "rejected":
            self._tokens.labels(label, "prompt").inc(row.prompt_tokens)
            self._tokens.labels(label, "output").inc(row.output_tokens)

    def count_limited(self, tenant: str, limit: str) -> None:
        """Counts a request over the limit."""
        self._limited.labels(self._label(tenant), limit).inc()

    def _label(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) >= _MAX_TENANTS:
                return _OTHERS
            self._known.add(tenant)
        return tenant
