"""Every metric of the kvstore. The store's own figures are read at scrape time: the store stays their one owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.rpc.metrics import RpcMetrics
from services.kvstore.store import StoreStats

_GAUGES = {
    "num_blocks": "Whole blocks held",
    "used_bytes": "Bytes of whole blocks",
    "reserved_bytes": "Bytes of blocks still arriving",
    "budget_bytes": "Most bytes the store may hold",
}
_COUNTERS = {
    "num_hits_total": "Blocks read",
    "num_misses_total": "Reads of absent blocks",
    "num_stored_total": "Blocks that became whole",
    "num_evicted_total": "Blocks that made room for others",
    "num_corrupted_total": "Blocks dropped because their digest failed",
}


class KVStoreMetrics(Collector):
    """Owns the service's registry."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats
        self.registry = CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The store's figures now; called from the metrics server's thread."""
        stats = self._stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"halfmoon_kvstore_{name.removeprefix('num_')}", text, getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"halfmoon_kvstore_{name.removeprefix('num_')}", text, getattr(stats, name))
