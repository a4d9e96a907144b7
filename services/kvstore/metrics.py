"""All metrics of the store. Its figures are read at scrape time, so the store stays their one owner."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from services.kvstore.pool import Pool
from services.kvstore.servicer import stats_message

_PREFIX = "halfmoon_kvstore_"
_NUM_TENANTS = 20  # with series of their own
_OTHER_TENANTS = "(others)"  # not an id of a tenant
_COUNTERS = {
    "misses": "Reads that no tier could serve",
    "stored": "Blocks stored",
    "expired": "Blocks expired",
    "replicated": "Blocks copied from another store",
    "unreplicated": "Blocks whose copy from another store failed",
    "cooled": "Unused copies of another store's blocks dropped",
}
_TIER_GAUGES = {
    "num_blocks": "Whole blocks held",
    "used_bytes": "Bytes of whole blocks",
    "budget_bytes": "Most bytes the tier may hold at present",
    "configured_bytes": "Most bytes the tier may hold while nobody else needs the disk",
    "num_waiting": "Blocks to be copied to the tier",
}
_TIER_COUNTERS = {
    "hits": "Blocks read from the tier",
    "evicted": "Blocks evicted to make room",
    "corrupted": "Copies dropped because they were damaged, forged or missing",
    "failed": "Operations of the tier that failed",
    "written": "Copies written from a faster tier",
    "skipped": "Copies that could not be made",
    "full": "Writes that the tier's file system had no room for",
}


class KVStoreMetrics(Collector):
    """Owns the service's registry."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the store's present figures. Called on the metrics server's thread, which only reads numbers."""
        stats = stats_message(self._pool)
        yield GaugeMetricFamily(f"{_PREFIX}reserved_bytes", "Bytes of blocks still arriving", stats.reserved_bytes)
        yield GaugeMetricFamily(f"{_PREFIX}replicas", "Blocks that are copies of another store's", stats.num_replicas)
        yield GaugeMetricFamily(
            f"{_PREFIX}begun_elsewhere",
            "Runs of blocks whose beginning is on another store, or lost",
            stats.num_begun_elsewhere,
        )
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}{name}_total", text, getattr(stats, f"num_{name}_total"))
        for name, text in _TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}{name.removeprefix('num_')}", text, labels=["tier"])
            for tier in stats.tiers:
                gauge.add_metric([_name(tier)], getattr(tier, name))
            yield gauge
        yield from _tenants(stats)
        works = GaugeMetricFamily(
            f"{_PREFIX}works", "1 while the tier is used and written, 0 in trouble", labels=["tier"]
        )
        for tier in stats.tiers:
            works.add_metric([_name(tier)], 0.0 if tier.trouble else 1.0)
        yield works
        for name, text in _TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"{_PREFIX}{name}_total", text, labels=["tier"])
            for tier in stats.tiers:
                counter.add_metric([_name(tier)], getattr(tier, f"num_{name}_total"))
            yield counter


def _tenants(stats: kvstore_pb2.StatsResponse) -> Iterator[Metric]:
    """What the largest tenants hold; the others are one series, so that keys can come and go."""
    held = GaugeMetricFamily(f"{_PREFIX}tenant_bytes", "Bytes of a tenant's blocks, each once", labels=["tenant"])
    quota = GaugeMetricFamily(f"{_PREFIX}tenant_quota_bytes", "Most of them; 0 without a limit", labels=["tenant"])
    for account in stats.tenants[:_NUM_TENANTS]:
        held.add_metric([account.tenant], account.used_bytes)
        quota.add_metric([account.tenant], account.quota_bytes)
    if rest := stats.tenants[_NUM_TENANTS:]:
        held.add_metric([_OTHER_TENANTS], sum(account.used_bytes for account in rest))
    yield held
    yield quota


def _name(tier: kvstore_pb2.TierStats) -> str:
    return kvstore_pb2.KVTier.Name(tier.tier).lower()
