"""Metrics of a worker's use of the store."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class StoreMetrics:
    """Declares the metrics in a worker's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.put_blocks = Counter(
            "halfmoon_store_put_blocks", "Blocks offered to the store by outcome", ["outcome"], registry=registry
        )
        self.put_chains_dropped = Counter(
            "halfmoon_store_put_chains_dropped", "Prompts not offered: too many waited", registry=registry
        )
        self.restored_tokens = Counter(
            "halfmoon_restored_tokens",
            "Prompt tokens by where their KV came from: cache, store or computed",
            ["source"],
            registry=registry,
        )
        self.restore_decisions = Counter(
            "halfmoon_restore_decisions", "Prompts by restore method chosen", ["method"], registry=registry
        )
        self.loaded_bytes = Counter(
            "halfmoon_store_loaded_bytes", "KV bytes loaded from the store by tier", ["tier"], registry=registry
        )
        self.missed_blocks = Counter(
            "halfmoon_store_missed_blocks", "Blocks the store announced but did not deliver intact", registry=registry
        )
        self.put_bytes = Counter("halfmoon_store_put_bytes", "KV bytes sent to the store", registry=registry)
